"""Algorithms: what a task needs, its advantages and its losses, as pure functions; one file for each variant."""
