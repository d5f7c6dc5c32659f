"""Preflight checks: what goes wrong on clusters, found in a minute and before a job.

Gathering facts (facts.py, on each node) is apart from judging them (pure functions from facts to findings).
Belongs to the launching half: what needs torch runs in a process of its own, with a deadline.
"""
