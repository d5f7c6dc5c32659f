"""Pass@k: a group is worth whether any k of its rollouts hold one that passes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hpc_grpo.algorithms.advantages.base import over_valid
from hpc_grpo.registry import ADVANTAGES


@ADVANTAGES.register("pass_k", pass_k=4)
def pass_k_advantages(
    rewards: Sequence[float], valid: Sequence[bool], normalize_std: bool, pass_k: int
) -> tuple[float, ...]:
    """Compute the advantages `[G]` of the rollouts of one prompt over its N valid rollouts, F of which failed.

    R = 1 - C(F, k) / C(N, k),   s = sqrt(R * (1 - R))
    A of one that passed = (1 - R) / s
    A of one that failed = (1 - R - C(F - 1, k - 1) / C(N - 1, k - 1)) / s

    The mean advantage over all k-subsets that a rollout is in, of GRPO on subsets (Pass@k Training, arXiv:2508.10751,
    section 2.4). A reward above 0 has passed. Where all subsets are worth the same, and where N < k, all get 0.0.

    >>> [round(a, 4) for a in pass_k_advantages((1.0, 0.0, 0.0), (True,) * 3, None, pass_k=2)]
    [0.7071, -0.3536, -0.3536]
    """
    counted = over_valid(rewards, valid)
    count, failed = len(counted), sum(reward <= 0.0 for reward in counted)
    if count < pass_k or not pass_k <= failed < count:
        return (0.0,) * len(rewards)
    missed = math.comb(failed, pass_k) / math.comb(count, pass_k)
    deviation = math.sqrt(missed * (1.0 - missed))
    others_missed = math.comb(failed - 1, pass_k - 1) / math.comb(count - 1, pass_k - 1)
    worth = {True: missed / deviation, False: (missed - others_missed) / deviation}
    return tuple(worth[r > 0.0] if ok else 0.0 for r, ok in zip(rewards, valid, strict=True))
