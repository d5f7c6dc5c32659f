"""GRPO post-training of language models as a Slurm job that survives. Python for scripts: see docs/python.md."""

from typing import TYPE_CHECKING, Any

from hpc_grpo.episodes import Turn

if TYPE_CHECKING:
    from hpc_grpo.api import Comparison, Job, Run, compare, submit, train

__all__ = ["Comparison", "Job", "Run", "Turn", "compare", "submit", "train"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Load `hpc_grpo.api` at the first use of one of its names: most processes of a run use none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hpc_grpo import api

    return getattr(api, name)
