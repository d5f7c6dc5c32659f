"""Plan a run before it starts, without torch: memory by device, time of a step, what to change. Read fit.py first."""
