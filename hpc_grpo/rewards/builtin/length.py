"""Built-in reward: shapes the length of completions; at most 0.0, or up to 1.0 around a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward

_UNITS = ("words", "characters")


@reward("length")
def length(
    prompts: Sequence[str],
    completions: Sequence[str],
    most: int | None = None,
    over: int | None = None,
    target: int | None = None,
    unit: str = "words",
    **fields: Any,
) -> list[float]:
    """Return a soft penalty above `most`, or the closeness to `target`, in words or characters.

    With `most`: 0 up to it, then falling to -1 in a straight line over the next `over` (as DAPO's overlong penalty,
    arXiv:2503.14476, equation 13, which counts tokens), -1 beyond. With `target`: 1 - |length - target| / target, and
    0 from twice the target on.
    """
    if (most is None) == (target is None) or unit not in _UNITS:
        raise ConfigError(
            f"length needs one of most and target, and unit words or characters; got most={most}, target={target}, "
            f"unit={unit!r}. Set rewards.N.args."
        )
    if min(value for value in (most, target) if value is not None) < 1 or (over is not None and over < 1):
        raise ConfigError("length: most, target and over are counts of at least 1. Set rewards.N.args.")
    sizes = [len(text.split()) if unit == "words" else len(text) for text in completions]
    if target is not None:
        return [max(0.0, 1.0 - abs(size - target) / target) for size in sizes]
    assert most is not None
    return [-min(1.0, max(0, size - most) / (over or most)) for size in sizes]
