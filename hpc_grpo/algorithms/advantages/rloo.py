"""RLOO: each reward against the others of its group."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.algorithms.advantages.base import over_valid
from hpc_grpo.registry import ADVANTAGES


@ADVANTAGES.register("rloo")
def leave_one_out(rewards: Sequence[float], valid: Sequence[bool], normalize_std: bool) -> tuple[float, ...]:
    """Compute the advantages `[G]` of the rollouts of one prompt over its valid rollouts.

    A_i = r_i - mean of r_j over j != i        (REINFORCE leave-one-out, arXiv:2402.14740, eq. 7)

    G / (G - 1) times the distance to the mean of all: an unbiased baseline, which `group`'s is not. 0.0 for a group of
    one valid rollout.

    >>> leave_one_out((9.0, 12.0, 1.0), (True, True, False), None)
    (-3.0, 3.0, 0.0)
    """
    counted = over_valid(rewards, valid)
    total, others = sum(counted), len(counted) - 1
    if others < 1 or max(counted) == min(counted):
        return (0.0,) * len(rewards)
    return tuple(r - (total - r) / others if ok else 0.0 for r, ok in zip(rewards, valid, strict=True))
