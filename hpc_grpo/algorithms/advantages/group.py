"""Group advantages, as GRPO has them. The driver calls it on tuples of floats."""

from __future__ import annotations

from collections.abc import Sequence

from hpc_grpo.registry import ADVANTAGES

_STD_EPS = 1e-4
"""Added to the standard deviation, as in TRL: a group of almost equal rewards must not explode."""


@ADVANTAGES.register("group", normalize_std=True)
def group_advantages(rewards: Sequence[float], valid: Sequence[bool], normalize_std: bool) -> tuple[float, ...]:
    """Compute the advantages `[G]` of the rollouts of one prompt over its valid rollouts.

    A_i = (r_i - mean(r)) / (std(r) + eps)        (DeepSeekMath, arXiv:2402.03300, eq. in section 4.1.2)
    A_i = r_i - mean(r)                           (Dr. GRPO, arXiv:2503.20783), with `normalize_std` off

    std is the sample standard deviation (divided by G - 1), as in TRL and verl; the paper does not say.
    Rollouts that are not valid neither count in mean and std nor get an advantage: theirs is 0.0. So is that
    of a group whose rewards are all equal, and of a group with one valid rollout.

    Raises ValueError if the lengths differ or a valid reward is not finite.

    >>> group_advantages((1.0, 0.0, 0.0, 1.0), (True,) * 4, normalize_std=False)
    (0.5, -0.5, -0.5, 0.5)
    >>> group_advantages((2.0, 0.0, 99.0), (True, True, False), normalize_std=False)
    (1.0, -1.0, 0.0)
    """
    import numpy as np

    if len(rewards) != len(valid):
        raise ValueError(f"{len(rewards)} rewards but {len(valid)} validity flags")
    values = np.asarray(rewards, dtype=np.float64)
    mask = np.asarray(valid, dtype=bool)
    counted = values[mask]
    if not np.isfinite(counted).all():
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    advantages = np.zeros_like(values)
    # Equal rewards are compared, not subtracted: the mean's rounding error must not become a gradient.
    if counted.size > 1 and counted.max() > counted.min():
        advantages[mask] = counted - counted.mean()
        if normalize_std:
            advantages[mask] /= counted.std(ddof=1) + _STD_EPS
    return tuple(advantages.tolist())
