"""Typed metrics: a learner reduces values over microbatches, the driver reduces values over ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mean:
    """A mean: `total` divided by `count` items. A mean of nothing is 0.0 by convention."""

    total: float
    count: float = 1.0

    def merged(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Max:
    value: float

    def merged(self, other: Max) -> Max:
        return Max(max(self.value, other.value))

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class EffectiveSampleSize:
    """Kish's effective size of a weighted sample, as a share of its `count`: 1.0 if all weights are equal.

    (sum w)^2 / (count * sum w^2); `total` and `squares` are the two sums.
    """

    total: float
    squares: float
    count: float

    def merged(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        return EffectiveSampleSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def result(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.count and self.squares else 0.0


Reduction = Mean | Max | EffectiveSampleSize


def merge(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, float]:
    """Reduce the metrics of all ranks to numbers, in the order of first appearance.

    Raises TypeError when two ranks report one name with different kinds of reduction.

    >>> merge([{"a": Mean(1.0, 2), "b": Max(3.0)}, {"a": Mean(5.0, 1), "b": Max(1.0)}])
    {'a': 2.0, 'b': 3.0}
    """
    merged: dict[str, Reduction] = {}
    for part in parts:
        for name, reduction in part.items():
            if name in merged and type(merged[name]) is not type(reduction):
                raise TypeError(
                    f"metric {name!r} is a {type(merged[name]).__name__} on one rank, a {type(reduction).__name__} on "
                    f"another"
                )
            merged[name] = merged[name].merged(reduction) if name in merged else reduction  # type: ignore[arg-type]
    return {name: reduction.result() for name, reduction in merged.items()}
