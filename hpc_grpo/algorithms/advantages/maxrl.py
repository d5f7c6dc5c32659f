"""MaxRL: hard prompts count as they do in maximum likelihood."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.algorithms.advantages.base import over_valid
from hpc_grpo.registry import ADVANTAGES


@ADVANTAGES.register("maxrl")
def maxrl(rewards: Sequence[float], valid: Sequence[bool], normalize_std: bool) -> tuple[float, ...]:
    """Compute the advantages `[G]` of the rollouts of one prompt over its valid rollouts.

    A_i = (r_i - mean(r)) / mean(r)        (Maximum Likelihood Reinforcement Learning, arXiv:2602.02710)

    For rewards of 0 and 1: the gradient of the log of the pass rate, as far as G samples tell it. Where the mean is not
    positive nothing was solved, and the advantages are 0.0.

    >>> maxrl((9.0, 3.0, 99.0), (True, True, False), None)
    (0.5, -0.5, 0.0)
    """
    counted = over_valid(rewards, valid)
    mean = sum(counted) / len(counted) if counted else 0.0
    if mean <= 0.0 or max(counted) == min(counted):
        return (0.0,) * len(rewards)
    return tuple((r - mean) / mean if ok else 0.0 for r, ok in zip(rewards, valid, strict=True))
