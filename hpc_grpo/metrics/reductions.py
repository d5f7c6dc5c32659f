"""Typed metrics: how values of microbatches and ranks become one number.

A learner gives its own; the driver merges those of all learners.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Sum:
    """Adds up over ranks."""

    value: float

    def merged(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)

    def result(self) -> float:
        return self.value


@dataclass(frozen=True)
class Mean:
    """Divides `total` by `count` items; a mean of nothing is 0.0 by convention."""

    total: float
    count: float = 1.0

    def merged(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    def result(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Max:
    """Keeps the largest over ranks."""

    value: float

    def merged(self, other: Max) -> Max:
        return Max(max(self.value, other.value))

    def result(self) -> float:
        return self.value


Reduction = Sum | Mean | Max


def merge(parts: Iterable[Mapping[str, Reduction]]) -> dict[str, float]:
    """Reduce the metrics of all ranks to numbers, in the order of first appearance.

    Raises TypeError when two ranks report one name with different kinds of reduction.

    >>> merge([{"a": Mean(1.0, 2), "b": Max(3.0)}, {"a": Mean(5.0, 1), "b": Max(1.0)}])
    {'a': 2.0, 'b': 3.0}
    """
    merged: dict[str, Reduction] = {}
    for part in parts:
        for name, reduction in part.items():
            merged[name] = _merge_two(name, merged[name], reduction) if name in merged else reduction
    return {name: reduction.result() for name, reduction in merged.items()}


def _merge_two(name: str, left: Reduction, right: Reduction) -> Reduction:
    match left, right:
        case (Sum(), Sum()) | (Mean(), Mean()) | (Max(), Max()):
            return left.merged(right)  # type: ignore[arg-type]
        case _:
            raise TypeError(
                f"metric {name!r} is a {type(left).__name__} on one rank, a {type(right).__name__} on another"
            )
