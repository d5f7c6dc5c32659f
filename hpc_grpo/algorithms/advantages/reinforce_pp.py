"""REINFORCE++: rewards against those of the whole step."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.algorithms.advantages.base import over_valid, whitened
from hpc_grpo.registry import ADVANTAGES


@ADVANTAGES.register("reinforce_pp", normalize_std=True, whole_step=True)
def reinforce_pp(
    rewards: Sequence[Sequence[float]], valid: Sequence[Sequence[bool]], normalize_std: bool
) -> list[tuple[float, ...]]:
    """Compute the advantages of all groups of a step, each `[G]`, over all valid rollouts of the step.

    A_i = (r_i - mean(r)) / (std(r) + 1e-8)        (REINFORCE++, arXiv:2501.03262, eq. 6), std over N

    Mean and deviation are those of rollouts, not of tokens, and `normalize_std` off leaves the division out.

    >>> reinforce_pp([(1.0, 0.0), (1.0, 2.0)], [(True, True), (True, True)], normalize_std=False)
    [(0.0, -1.0), (0.0, 1.0)]
    """
    for group, flags in zip(rewards, valid, strict=True):
        over_valid(group, flags)
    return whitened(rewards, valid, normalize_std)
