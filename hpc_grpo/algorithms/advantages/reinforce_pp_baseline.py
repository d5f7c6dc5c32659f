"""REINFORCE++-baseline: rewards against their group's mean, scaled by the whole step."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.algorithms.advantages.base import whitened
from hpc_grpo.algorithms.advantages.group import group_advantages
from hpc_grpo.registry import ADVANTAGES


@ADVANTAGES.register("reinforce_pp_baseline", normalize_std=True, whole_step=True)
def reinforce_pp_baseline(
    rewards: Sequence[Sequence[float]], valid: Sequence[Sequence[bool]], normalize_std: bool
) -> list[tuple[float, ...]]:
    """Compute the advantages of all groups of a step, each `[G]`, over all valid rollouts of the step.

    b_i = r_i - mean over its group,   A_i = (b_i - mean(b)) / (std(b) + 1e-8)        (arXiv:2501.03262, eq. 7)

    std over N, of rollouts, not of tokens; `normalize_std` off leaves the division out. mean(b) is 0: a group whose
    rewards are all equal gets exactly 0.0.
    """
    centred = [group_advantages(group, flags, False) for group, flags in zip(rewards, valid, strict=True)]
    return whitened(centred, valid, normalize_std, mean=0.0)
