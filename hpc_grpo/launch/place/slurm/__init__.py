"""Slurm as a place and as a job queue."""
