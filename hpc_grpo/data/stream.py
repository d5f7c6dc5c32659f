"""The streams of prompts or demonstrations that a run trains on: pure functions of (seed, epoch, ordinal).

A stream keeps no position: a checkpoint holds only the ordinals that were used, and a resumed run sees the same data.

An epoch has a fixed number of shuffled places, a fixed share for each source. Each source has its own walk: all its
items come, shuffled, before any item repeats, even if an epoch holds only some of them.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import floor
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.cache import Row, Rows
from hpc_grpo.types import Demonstration, Prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Place(NamedTuple):
    """An ordinal's item: its position among the source's items, and how often it came before (`turn`)."""

    epoch: int
    source: int
    item: int
    turn: int


class MixOrder:
    """Maps ordinals, counted from 0 over the whole run, to items. `sizes` are the sources' numbers of items."""

    def __init__(self, sizes: Sequence[int], places: Sequence[int], seed: int, shuffle: bool) -> None:
        self._sizes, self._places, self._seed, self._shuffle = sizes, places, seed, shuffle
        self._ends = list(accumulate(places))
        # Caches two epochs: engines that sample ahead need the end of one epoch and the start of the next.
        self._permutation = lru_cache(2 * len(sizes) + 2)(epoch_permutation)
        self._shuffled = lru_cache(2)(self._shuffled_epoch)

    def __len__(self) -> int:
        return self._ends[-1]

    def find(self, ordinal: int) -> Place:
        """Return the place of the item at `ordinal`. Raises ValueError for a negative ordinal."""
        if ordinal < 0:
            raise ValueError(f"ordinal = {ordinal}: ordinals count from 0.")
        epoch, place = divmod(ordinal, len(self))
        if self._shuffle and len(self._sizes) > 1:
            source, rank = (int(of_places[place]) for of_places in self._shuffled(epoch))
        else:
            source = bisect_right(self._ends, place)
            rank = place - self._ends[source] + self._places[source]
        walk, item = divmod(epoch * self._places[source] + rank, self._sizes[source])
        if self._shuffle:
            item = int(self._permutation(self._sizes[source], self._seed, walk, source)[item])
        return Place(epoch, source, item, walk)

    def _shuffled_epoch(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source of each place of an epoch, and the place's rank among the places of that source."""
        import numpy as np

        num_sources = len(self._sizes)
        in_order = np.repeat(np.arange(num_sources), self._places)
        sources = in_order[epoch_permutation(len(self), self._seed, epoch, stream=num_sources)]
        ranks = np.empty_like(sources)
        for source, count in enumerate(self._places):
            ranks[sources == source] = np.arange(count)
        return sources, ranks


def epoch_permutation(num_items: int, seed: int, epoch: int, stream: int = 0) -> NDArray[np.int64]:
    """Shuffle the items for one epoch: entry `i` is the item at the epoch's place `i`. Streams are independent.

    PCG64 and SeedSequence give the same stream on every platform. NumPy may change `permutation` itself
    between feature releases (NEP 19), so a golden test pins the values this package was released with.
    """
    import numpy as np

    # SeedSequence pads with zeros, so stream 0 equals [seed, epoch].
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch, stream])))
    return generator.permutation(num_items)


def sampling_seed(run_seed: int, ordinal: int, sample_index: int, policy_version: int) -> int:
    """Derive the seed of one completion, in [0, 2**31). Engines with signed 32-bit seeds accept it too.

    This is a hash, not a sum, so neighbouring ordinals and samples share no seeds.
    """
    key = f"{run_seed}:{ordinal}:{sample_index}:{policy_version}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "big") >> 1


def places_per_epoch(sources: Sequence[SourceConfig], sizes: Sequence[int]) -> list[int]:
    """Return the number of prompts of each source in an epoch, at least one. `sizes` are the sources' numbers of items.

    With weights, an epoch has as many prompts as all sources have items. Weights set the shares (largest remainders).

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


@dataclass(frozen=True)
class Part:
    """One source of a stream: its rows, and the numbers of the rows in use, in order.

    `reward_set` is the index of its rewards in `config.reward_sets`. `environment` is the index of its environment in
    `config.environments`. `difficulty` ranks its items from 0 to 1 if `data.curriculum.difficulty_field` names a
    column.
    """

    name: str
    source: SourceConfig
    rows: Rows
    numbers: NDArray[np.int64]
    reward_set: int = 0
    environment: int | None = None
    difficulty: NDArray[np.float64] | None = None


class Stream:
    """Maps ordinals to items of sources. With one source, each item comes once in an epoch. Evals are not shuffled."""

    def __init__(self, parts: Sequence[Part], seed: int, *, shuffle: bool, for_eval: bool = False) -> None:
        self.parts = parts
        sizes = [len(part.numbers) for part in parts]
        places = sizes if for_eval else places_per_epoch([part.source for part in parts], sizes)
        self._order = MixOrder(sizes, places, seed, shuffle and not for_eval)
        self.num_items = sum(sizes)
        """Items of all sources; an epoch may have fewer places, or more."""

    def __len__(self) -> int:
        """Return the number of places of an epoch."""
        return len(self._order)

    def place(self, ordinal: int) -> Place:
        """Return the source and item of an ordinal, without reading it. Raises ValueError below 0."""
        return self._order.find(ordinal)

    def find(self, ordinal: int) -> tuple[int, Part, Row]:
        """Return the epoch, source and row of an ordinal."""
        place = self.place(ordinal)
        part = self.parts[place.source]
        return place.epoch, part, part.rows[int(part.numbers[place.item])]


def reward_fields(item: Mapping[str, Any], answer_field: str | None) -> Mapping[str, Any]:
    """Return the columns that rewards get: those of the item, and `answer` from `answer_field`. Raises KeyError."""
    return item if answer_field is None else {**item, "answer": answer_of(item, answer_field)}


def answer_of(item: Mapping[str, Any], field: str) -> Any:
    """Return the column `field`, or with a dotted name a value inside a column. Raises KeyError without it.

    >>> answer_of({"a.b": 1, "a": {"b": 2}}, "a.b"), answer_of({"a": {"b": 2}}, "a.b")
    (1, 2)
    """
    if field in item:
        return item[field]
    column, _, inside = field.partition(".")
    if not inside or not isinstance(item[column], Mapping):
        raise KeyError(field)
    return answer_of(item[column], inside)


class PromptStream(Stream):
    def prompt(self, ordinal: int) -> Prompt:
        epoch, part, row = self.find(ordinal)
        fields = reward_fields(json.loads(row.fields), part.source.answer_field)
        tokens, images = tuple(row.prompt_ids), tuple(row.images)
        return Prompt(ordinal, epoch, tokens, row.text, fields, part.name, part.reward_set, part.environment, images)


class DemonstrationStream(Stream):
    """A stream of demonstrations. The completion is the item's answer and an end token."""

    def demonstration(self, ordinal: int) -> Demonstration:
        epoch, _, row = self.find(ordinal)
        return Demonstration(ordinal, epoch, tuple(row.prompt_ids), tuple(row.completion_ids))
