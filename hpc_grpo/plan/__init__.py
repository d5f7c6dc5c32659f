"""Plan a run before it starts, without torch: memory by device, disk, steps, what to change. Read fit.py first."""
