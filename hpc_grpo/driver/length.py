"""The length of a run in steps, and of its steps, evals and saves in seconds.

The seconds let a driver stop early enough for the last of each; state.json keeps them across attempts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.run.progress import RunState

_RECENT = 100
_ENOUGH = 5
_SAVE_BEFORE_MEASURED_S = 30.0


@dataclass(frozen=True)
class TrainLength:
    """`items_per_step` are prompts (GRPO) or demonstrations (SFT); an epoch has `items_per_epoch` of them."""

    total_steps: int
    items_per_step: int
    items_per_epoch: int

    @property
    def steps_per_epoch(self) -> int:
        return max(1, math.ceil(self.items_per_epoch / self.items_per_step))

    @property
    def total_epochs(self) -> int:
        return max(1, math.ceil(self.total_steps * self.items_per_step / self.items_per_epoch))

    def epochs_done(self, step: int) -> int:
        """Count the epochs whose last item was in `step` or before."""
        return step * self.items_per_step // self.items_per_epoch

    def epoch_and_step(self, step: int) -> tuple[int, int]:
        """Return the epoch of finished step `step` and its place in that epoch, all counted from 1."""
        first_item = (max(step, 1) - 1) * self.items_per_step
        epoch, place = divmod(first_item, self.items_per_epoch)
        return epoch + 1, place // self.items_per_step + 1


def train_length(config: Config, items_per_epoch: int) -> TrainLength:
    """Derive the steps from train.total_steps, total_episodes (rollouts, or demonstrations) or total_epochs."""
    train, algorithm = config.train, algorithm_of(config)
    items_per_step = algorithm.items_per_step
    if train.total_steps is not None:
        total = train.total_steps
    elif train.total_episodes is not None:
        total = math.ceil(train.total_episodes / (items_per_step * algorithm.episodes_per_item))
    else:
        total = math.ceil((train.total_epochs or 1) * items_per_epoch / items_per_step)
    return TrainLength(total, items_per_step, items_per_epoch)


class Durations:
    """Keep the 95th percentile of recent durations; until there are enough, not below that of the attempt before.

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
        return bool(self._recent)

    def add(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def p95_s(self) -> float | None:
        """Return seconds, or None before the first duration of the run."""
        if not self._recent:
            return self._earlier_s
        own_s = sorted(self._recent)[math.ceil(0.95 * len(self._recent)) - 1]
        return own_s if len(self._recent) >= _ENOUGH or self._earlier_s is None else max(own_s, self._earlier_s)


@dataclass(frozen=True)
class StepTimes:
    """Three kinds of durations, each apart: one eval in twenty steps would vanish behind the percentile of them all."""

    steps: Durations
    """Without the evals and saves that fell into them."""
    evals: Durations
    saves: Durations

    @staticmethod
    def after(state: RunState | None) -> StepTimes:
        """Start an attempt with what the last state of the one before knows."""
        if state is None:
            return StepTimes(Durations(), Durations(), Durations())
        return StepTimes(Durations(state.step_p95_s), Durations(state.eval_p95_s), Durations(state.save_p95_s))

    def add_step(self, times: Mapping[str, float]) -> None:
        if "time/eval_s" in times:
            self.evals.add(times["time/eval_s"])
        apart_s = times.get("time/eval_s", 0.0) + times.get("time/checkpoint_s", 0.0)
        self.steps.add(times["time/step_s"] - apart_s)

    def step_and_save_s(self, *, evaluates: bool, num_saves: int = 1) -> float:
        """Return the seconds that one more step and its saves may take: p95 of each, and of the eval if it `evaluates`.

        An attempt's first step counts as nothing: one slow step in the past must not keep all later attempts from
        ever taking another.
        """
        step_s = self.steps.p95_s or 0.0
        save_s = max(step_s, _SAVE_BEFORE_MEASURED_S) if self.saves.p95_s is None else self.saves.p95_s
        save_s *= num_saves
        if not self.steps.is_measured:
            return save_s
        eval_s = step_s if self.evals.p95_s is None else self.evals.p95_s
        return step_s + (eval_s if evaluates else 0.0) + save_s
