"""Corrections of the mismatch between engine and learner, which `loss.importance_correction` chooses from.

One file each. The policy term of every loss is multiplied by their weights; KL and entropy terms are not: they are
penalties on the learner, whoever sampled the token. A masked token still counts in `loss.denominator`.
"""
