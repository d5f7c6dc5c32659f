"""The curriculum: which prompts rest, as they were easy or hard in their last turns, for the others to come more often.

A form without chance of prime-rl's difficulty pools (its `curriculum/samplers/pool.py`): the mean reward of a prompt's
last group says which pool it is in, and what is drawn there with a weight of 1 / (n + 1) sits out n turns here. A rest
without an end is open-instruct's `no_resampling_pass_rate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpc_grpo.config import CurriculumConfig
from hpc_grpo.data.mix import Place
from hpc_grpo.data.stream import PromptStream
from hpc_grpo.types import GroupGrades

_ROUNDING = 1e-9
"""Allows for the rounding of a mean of equal rewards."""

Known = Mapping[str, tuple[int, int | None]]
"""Maps "source:item", positions both, to how many groups in a row were easy (or hard, negative), and the turn that it
rests until: None for ever. Prompts that are neither are left out. A checkpoint holds it as JSON.
"""

_NEITHER = (0, 0)


class Curriculum:
    """Knows of each prompt what its last groups were. What it says is a function of the grades it was given."""

    def __init__(self, settings: CurriculumConfig, known: Known) -> None:
        self._settings = settings
        self._known = {key: (streak, until) for key, (streak, until) in known.items()}

    def next_awake(self, stream: PromptStream, ordinal: int) -> int | None:
        """Return the first ordinal from here on whose prompt does not rest; None where each prompt rests for ever."""
        first = ordinal
        while self._rests(stream.place(ordinal)):
            ordinal += 1
            if (ordinal - first) % len(stream) == 0 and self._retired_all(stream):
                return None
        return ordinal

    def note(self, place: Place, grades: GroupGrades) -> None:
        """Learn what a group was; nothing of one whose reward failed."""
        if grades.errors:
            return
        settings, mean = self._settings, math.fsum(grades.rewards) / len(grades.rewards)
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

    @property
    def known(self) -> Known:
        """Return what a checkpoint has to hold of it."""
        return dict(self._known)

    @property
    def num_retired(self) -> int:
        return sum(until is None for _, until in self._known.values())

    def metrics(self) -> dict[str, float]:
        """Count the prompts whose last groups were easy, or hard, and those that rest for ever."""
        streaks, after = [streak for streak, _ in self._known.values()], self._settings.after
        return {
            "curriculum/easy": float(sum(streak >= after for streak in streaks)),
            "curriculum/hard": float(sum(streak <= -after for streak in streaks)),
            "curriculum/retired": float(self.num_retired),
        }

    def _rests(self, place: Place) -> bool:
        _, until = self._known.get(_key(place), _NEITHER)
        return until is None or place.turn < until

    def _retired_all(self, stream: PromptStream) -> bool:
        """Look at each item: what is known may be of data that had more of them."""
        items = (
            Place(0, source, item, 0) for source, part in enumerate(stream.parts) for item in range(len(part.numbers))
        )
        return all(self._known.get(_key(item), _NEITHER)[1] is None for item in items)


def _key(place: Place) -> str:
    return f"{place.source}:{place.item}"
