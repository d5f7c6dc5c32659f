"""Algorithms: what each task needs, and its losses, corrections and advantages."""
