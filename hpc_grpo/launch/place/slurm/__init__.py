"""Slurm. Only this folder knows Slurm."""
