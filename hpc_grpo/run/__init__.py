"""The run directory, through which processes share a run: where each file is, who writes it, and how to read it."""
