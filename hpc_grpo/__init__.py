"""GRPO post-training of language models as a Slurm job that survives."""

__version__ = "0.1.0"
