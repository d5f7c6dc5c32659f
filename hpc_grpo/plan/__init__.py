"""What a run needs before it starts: memory by device, tokens by step, and what to change where it does not fit.

Pure arithmetic on the config and a model's shape: no torch, so that it answers on a login node. docs/memory.md has the
formulas and a worked example.
"""
