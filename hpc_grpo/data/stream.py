"""The streams of prompts or demonstrations that a run trains on: pure functions of (seed, epoch, ordinal).

A stream keeps no position. The caller remembers which ordinals were used, so a checkpoint holds nothing of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.cache import Rows
from hpc_grpo.data.encoder import Row
from hpc_grpo.data.order import MixOrder, Place, places_per_epoch
from hpc_grpo.data.sources import reward_fields
from hpc_grpo.types import Demonstration, Prompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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
