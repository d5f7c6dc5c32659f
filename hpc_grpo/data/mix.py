"""The order of a stream: which item of which source an ordinal is. Pure functions of (seed, epoch, ordinal).

An epoch has a fixed number of places, so many for each source, shuffled. A source is walked through on its own: all its
items, shuffled, before any of them comes again, however few of its places an epoch has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpc_grpo.data.seeds import epoch_permutation

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUM_CACHED = 2
"""Engines that run ahead straddle at most the end of one epoch and the start of the next."""


class Place(NamedTuple):
    """Says what an ordinal stands for: `item` is a place among the source's, `turn` how often it was asked before."""

    epoch: int
    source: int
    item: int
    turn: int


class MixOrder:
    """Maps ordinals, which count from 0 over the whole run, to the items of sources with `sizes` items."""

    def __init__(self, sizes: Sequence[int], places: Sequence[int], seed: int, shuffle: bool) -> None:
        self._sizes = sizes
        self._places = np.asarray(places, dtype=np.int64)
        self._seed = seed
        self._shuffle = shuffle
        self._epochs: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self._walks: list[dict[int, NDArray[np.int64]]] = [{} for _ in sizes]

    def __len__(self) -> int:
        return int(self._places.sum())

    def find(self, ordinal: int) -> Place:
        """Return what is at `ordinal`. Raises ValueError for a negative one."""
        if ordinal < 0:
            raise ValueError(f"ordinal = {ordinal}: ordinals count from 0.")
        epoch, place = divmod(ordinal, len(self))
        source, rank = self._source_at(epoch, place)
        walk, position = divmod(epoch * int(self._places[source]) + rank, self._sizes[source])
        return Place(epoch, source, self._item_at(source, walk, position), walk)

    def _source_at(self, epoch: int, place: int) -> tuple[int, int]:
        """Return the source of a place of an epoch, and how many places before it are that source's."""
        if len(self._sizes) == 1:
            return 0, place
        if not self._shuffle:
            ends = np.cumsum(self._places)
            source = int(np.searchsorted(ends, place, side="right"))
            return source, place - int(ends[source] - self._places[source])
        if epoch not in self._epochs:
            _make_room(self._epochs)
            self._epochs[epoch] = self._shuffled(epoch)
        sources, ranks = self._epochs[epoch]
        return int(sources[place]), int(ranks[place])

    def _shuffled(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each place of an epoch, and its rank among the places of that source."""
        num_sources = len(self._sizes)
        in_order = np.repeat(np.arange(num_sources), self._places)
        sources = in_order[epoch_permutation(len(self), self._seed, epoch, stream=num_sources)]
        ranks = np.empty_like(sources)
        for source, count in enumerate(self._places):
            ranks[sources == source] = np.arange(count)
        return sources, ranks

    def _item_at(self, source: int, walk: int, position: int) -> int:
        """Return the item at a position of the source's walk number `walk`."""
        if not self._shuffle:
            return position
        walks = self._walks[source]
        if walk not in walks:
            _make_room(walks)
            walks[walk] = epoch_permutation(self._sizes[source], self._seed, walk, stream=source)
        return int(walks[walk][position])


def _make_room(cached: dict[int, Any]) -> None:
    while len(cached) >= _NUM_CACHED:
        del cached[min(cached)]
