"""How many prompts each source of a mix gives to an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from hpc_grpo.config import SourceConfig


def places_per_epoch(sources: Sequence[SourceConfig], sizes: Sequence[int]) -> list[int]:
    """Return how many prompts each source, of so many items, gives to an epoch: at least one.

    By weights an epoch has as many places as there are items, shared by the largest remainders.

    >>> places_per_epoch([SourceConfig(path="a", weight=2), SourceConfig(path="b", weight=1)], [10, 90])
    [67, 33]
    >>> places_per_epoch([SourceConfig(path="a", count=5), SourceConfig(path="b")], [10, 90])
    [5, 90]
    """
    weights = [source.weight or 0.0 for source in sources]
    if not any(weights):
        return [source.count or size for source, size in zip(sources, sizes, strict=True)]
    shares = [weight / sum(weights) * sum(sizes) for weight in weights]
    places = [floor(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda position: places[position] - shares[position])
    for position in by_remainder[: sum(sizes) - sum(places)]:
        places[position] += 1
    return [max(1, count) for count in places]
