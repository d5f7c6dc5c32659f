"""Metrics: their reductions, their timing, and their output to files, services and the console."""
