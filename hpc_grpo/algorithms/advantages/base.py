"""Share among advantages: checks, the normalisation over a whole step, and the soft penalty of long completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

AdvantageFunction = Callable[..., Sequence[float]]
"""`f(rewards, valid, normalize_std) -> advantages`, each `[G]`, of one whole group."""

StepAdvantageFunction = Callable[..., Sequence[Sequence[float]]]
"""The same for all groups of a step together: sequences of what an AdvantageFunction takes and gives."""


def over_valid(rewards: Sequence[float], valid: Sequence[bool]) -> list[float]:
    """Return the rewards that are valid. Raises ValueError if the lengths differ or one of them is not finite."""
    if len(rewards) != len(valid):
        raise ValueError(f"{len(rewards)} rewards but {len(valid)} validity flags")
    counted = [float(reward) for reward, ok in zip(rewards, valid, strict=True) if ok]
    if not all(map(math.isfinite, counted)):
        raise ValueError(f"rewards must be finite, got {list(rewards)}")
    return counted


def whitened(
    values: Sequence[Sequence[float]], valid: Sequence[Sequence[bool]], normalize_std: bool, mean: float | None = None
) -> list[tuple[float, ...]]:
    """Give the valid values of all groups together mean 0 and, with `normalize_std`, deviation 1; others become 0.0.

    `mean` is theirs where it is known exactly: values that equal it then become exactly 0.0.
    """
    counted = [v for group, flags in zip(values, valid, strict=True) for v, ok in zip(group, flags, strict=True) if ok]
    if not counted or max(counted) == min(counted):
        return [(0.0,) * len(group) for group in values]
    centre = math.fsum(counted) / len(counted) if mean is None else mean
    deviation = math.sqrt(math.fsum((value - centre) ** 2 for value in counted) / len(counted))
    scale = deviation + 1e-8 if normalize_std else 1.0

    def own(value: Any, ok: bool) -> float:
        return (value - centre) / scale if ok else 0.0

    return [tuple(map(own, group, flags)) for group, flags in zip(values, valid, strict=True)]


def overlong_penalty(num_tokens: int, longest: int, buffer: int) -> float:
    """Return what a completion of so many tokens adds to its reward: 0.0 down to -1.0 at `longest`.

    0                                              n <= longest - buffer
    ((longest - buffer) - n) / buffer              else                    (DAPO, arXiv:2503.14476, eq. 13)

    >>> [overlong_penalty(n, longest=20, buffer=4) for n in (16, 17, 20)]
    [0.0, -0.25, -1.0]
    """
    return min(0.0, (longest - buffer - num_tokens) / buffer)
