"""The curriculum: skips prompts that were easy or hard when they last came, so that other prompts come more often.

Like prime-rl's difficulty pools (its `curriculum/samplers/pool.py`), but without random draws. A prompt's pool depends
on the mean reward of its last group. Where prime-rl draws a pool with weight 1 / (n + 1), here a prompt is skipped n
times. Skipping forever is open-instruct's `no_resampling_pass_rate`. If a column gives the difficulty, harder prompts
come in later, as the competence of Platanios et al. 2019 (arXiv:1903.09848, eq. 7) grows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from hpc_grpo.config import CurriculumConfig
from hpc_grpo.data.stream import Part, Place, PromptStream
from hpc_grpo.errors import ConfigError
from hpc_grpo.system.readable import finite_or_none
from hpc_grpo.types import GroupGrades

_ROUNDING = 1e-9
"""Allows for the rounding of a mean of equal rewards."""

Known = Mapping[str, tuple[int, int | None]]
"""Maps "source:item" (two positions) to a prompt's streak and the turn when its rest ends (None: never).

The streak counts easy groups in a row; it is negative for hard groups. Prompts without a streak are left out. A
checkpoint holds this mapping as JSON.
"""

_NEITHER = (0, 0)
_FIRST_COMPETENCE = 0.01
"""The paper's c_0: the share of prompts, the easiest, that a run begins with."""


class Curriculum:
    """Remembers each prompt's last groups. Its decisions depend only on the grades it has seen."""

    def __init__(self, settings: CurriculumConfig, known: Known) -> None:
        self._settings = settings
        self._known = {key: (streak, until) for key, (streak, until) in known.items()}

    @property
    def known(self) -> Known:
        """Return the state for a checkpoint."""
        return dict(self._known)

    def next_awake(self, stream: PromptStream, ordinal: int) -> int | None:
        """Return the first ordinal from `ordinal` on whose prompt does not rest; None if every prompt rests forever."""
        first = ordinal
        while self._rests(stream, ordinal):
            ordinal += 1
            if (ordinal - first) % len(stream) == 0 and self._retired_all(stream):
                return None
        return ordinal

    def _rests(self, stream: PromptStream, ordinal: int) -> bool:
        """Return True if the prompt rests, or if its difficulty rank is at least the competence c.

        c = min(1, sqrt(t (1 - c_0^2) / T + c_0^2)), with the prompt's ordinal t, and T prompts in `difficulty_epochs`
        """
        place = stream.place(ordinal)
        _, until = self._known.get(_key(place), _NEITHER)
        if until is None or place.turn < until:
            return True
        if (ranks := stream.parts[place.source].difficulty) is None:
            return False
        progress = ordinal / (self._settings.difficulty_epochs * len(stream))
        competence = math.sqrt(progress * (1 - _FIRST_COMPETENCE**2) + _FIRST_COMPETENCE**2)
        return bool(ranks[place.item] >= competence)

    def _retired_all(self, stream: PromptStream) -> bool:
        """Return whether all items rest forever. Checks each item: the known state may come from a larger data set."""
        keys = (f"{source}:{item}" for source, part in enumerate(stream.parts) for item in range(len(part.numbers)))
        return all(self._known.get(key, _NEITHER)[1] is None for key in keys)

    def note(self, place: Place, grades: GroupGrades) -> None:
        """Record a group's outcome, from the rollouts whose reward and environment did not fail."""
        rewards = list(compress(grades.rewards, grades.is_scored))
        if not rewards:
            return
        settings, mean = self._settings, math.fsum(rewards) / len(rewards)
        streak, _ = self._known.pop(_key(place), _NEITHER)
        if mean >= settings.easy_from - _ROUNDING:
            streak, rest = max(streak, 0) + 1, settings.easy_rest
        elif settings.hard_to is not None and mean <= settings.hard_to + _ROUNDING:
            streak, rest = min(streak, 0) - 1, settings.hard_rest
        else:
            return
        if abs(streak) < settings.after:
            rest = 0
        self._known[_key(place)] = (streak, None if rest is None else place.turn + rest + 1)

    def metrics(self) -> dict[str, float]:
        """Count the prompts whose last groups were easy, or hard, and the prompts that rest forever."""
        known, after = self._known.values(), self._settings.after
        return {
            "curriculum/easy": float(sum(streak >= after for streak, _ in known)),
            "curriculum/hard": float(sum(streak <= -after for streak, _ in known)),
            "curriculum/retired": float(sum(until is None for _, until in known)),
        }


def difficulty_ranks(part: Part, field: str) -> NDArray[np.float64]:
    """Rank the items of a source by a column: each item's share of easier items. Equal items get the same rank.

    Reads every item. Raises ConfigError with the number of the first item whose value is no number.
    """
    values = np.empty(len(part.numbers))
    for position, number in enumerate(part.numbers):
        value = json.loads(part.rows[int(number)].fields).get(field)
        found = None if isinstance(value, bool) else finite_or_none(value)
        if found is None:
            raise ConfigError(
                f"Item {number} of {part.source.path} (counted from 0): {field!r} (data.curriculum.difficulty_field) "
                f"must be a number, larger for harder prompts, not {value!r}. Give it one, or name another column."
            )
        values[position] = found
    return np.searchsorted(np.sort(values), values, side="left") / len(values)


def _key(place: Place) -> str:
    return f"{place.source}:{place.item}"
