"""Metrics: how they are reduced to numbers, timed, and written to files, services and the console."""
