"""How long steps, evals and saves take in this run, so that a driver can stop in time for the last of each.

Kept across attempts in state.json: a new attempt knows the 95th percentiles of the one before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_grpo.run.progress import RunState

_RECENT = 100
_ENOUGH = 5
_SAVE_BEFORE_MEASURED_S = 30.0


class Durations:
    """The 95th percentile of recent durations; until there are enough, not below that of the attempt before.

    >>> durations = Durations(earlier_p95_s=4.0)
    >>> durations.add(1.0)
    >>> durations.p95_s
    4.0
    """

    def __init__(self, earlier_p95_s: float | None = None) -> None:
        self._earlier_s = earlier_p95_s
        self._recent: deque[float] = deque(maxlen=_RECENT)

    @property
    def is_measured(self) -> bool:
        """Whether this attempt has a duration of its own."""
        return bool(self._recent)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def p95_s(self) -> float | None:
        """Seconds; None before the first duration of the run."""
        if not self._recent:
            return self._earlier_s
        own_s = sorted(self._recent)[math.ceil(0.95 * len(self._recent)) - 1]
        return own_s if len(self._recent) >= _ENOUGH or self._earlier_s is None else max(own_s, self._earlier_s)


@dataclass(frozen=True)
class StepTimes:
    """Each of the three apart: one eval in twenty steps would vanish behind the 95th percentile of them all."""

    steps: Durations
    """Without the evals and saves that fell into them."""
    evals: Durations
    saves: Durations

    @staticmethod
    def after(state: RunState | None) -> StepTimes:
        """The pace that an attempt starts with, from the last state of the one before."""
        if state is None:
            return StepTimes(Durations(), Durations(), Durations())
        return StepTimes(Durations(state.step_p95_s), Durations(state.eval_p95_s), Durations(state.save_p95_s))

    def add_step(self, times: Mapping[str, float]) -> None:
        """Take in a finished step's times, as `StepTimer.finish_step` has them."""
        if "time/eval_s" in times:
            self.evals.add(times["time/eval_s"])
        apart_s = times.get("time/eval_s", 0.0) + times.get("time/checkpoint_s", 0.0)
        self.steps.add(times["time/step_s"] - apart_s)

    def step_and_save_s(self, *, evaluates: bool) -> float:
        """Seconds that one more step and a save may take: p95 of each, and of an eval if the step `evaluates`.

        An attempt's first step counts as nothing: one slow step in the past must not keep all later attempts from
        ever taking another.
        """
        step_s = self.steps.p95_s or 0.0
        save_s = max(step_s, _SAVE_BEFORE_MEASURED_S) if self.saves.p95_s is None else self.saves.p95_s
        if not self.steps.is_measured:
            return save_s
        eval_s = step_s if self.evals.p95_s is None else self.evals.p95_s
        return step_s + (eval_s if evaluates else 0.0) + save_s
