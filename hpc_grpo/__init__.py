"""GRPO post-training of language models as a Slurm job that survives."""

from hpc_grpo.episodes import Turn

__all__ = ["Turn"]
__version__ = "0.1.0"
