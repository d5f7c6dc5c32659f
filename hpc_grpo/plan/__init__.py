"""Plan a run before it starts: memory by device, time and tokens of a step, and what to change where it does not fit.

Pure arithmetic on the config and a model's shape: no torch, so that it answers on a login node. docs/memory.md has the
formulas and a worked example. Read fit.py first.
"""
