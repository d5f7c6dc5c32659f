"""Plan a run before it starts: memory by device, time and tokens of a step, and what to change where it does not fit.

No torch, so that it answers on a login node. docs/memory.md has the formulas. Read fit.py first.
"""
