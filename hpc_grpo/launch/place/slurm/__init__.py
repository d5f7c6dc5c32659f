"""Slurm, and the only code that knows it."""
