"""Timing: the run's length in steps, the time of a step, what is due, and when to stop.

Imports neither Ray nor torch, so the driver can check for stop requests before Ray has started.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.config import Config
from hpc_grpo.config.run import Every
from hpc_grpo.run.contract import ENDS_AT_VARIABLE, RAY_ADDRESS_FILE_VARIABLE, WARNING_BEFORE_END_S
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import RunState
from hpc_grpo.run.pulse import PULSE

_RECENT = 100
_ENOUGH = 5
_SAVE_BEFORE_MEASURED_S = 30.0
_POLL_S = 0.25
_MARGIN_S = 30.0
_EARLIEST_WARNING_S = WARNING_BEFORE_END_S + 60.0


@dataclass(frozen=True)
class TrainLength:
    """The length of a run. Items are prompts, or demonstrations (SFT)."""

    total_steps: int
    items_per_step: int
    items_per_epoch: int

    @property
    def total_epochs(self) -> int:
        return self.epoch_of(self.total_steps)

    def epochs_done(self, step: int) -> int:
        """Count the epochs whose last item was in `step` or before."""
        return step * self.items_per_step // self.items_per_epoch

    def epoch_of(self, step: int) -> int:
        """Return the epoch in which `step` begins, counted from 1."""
        return (max(step, 1) - 1) * self.items_per_step // self.items_per_epoch + 1


def train_length(config: Config, items_per_epoch: int) -> TrainLength:
    """Return the length by train.total_steps, total_episodes (rollouts, demonstrations) or total_epochs (default 1)."""
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
    """The 95th percentile of the last 100 durations, in seconds.

    With fewer than 5 durations, it is at least the percentile of the previous attempt.

    >>> durations = Durations(earlier_p95_s=4.0)
    >>> durations.add(1.0)
    >>> durations.p95_s
    4.0
    """

    def __init__(self, earlier_p95_s: float | None = None) -> None:
        self._earlier_s = earlier_p95_s
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self.add = self._recent.append

    @property
    def is_measured(self) -> bool:
        return bool(self._recent)

    @property
    def p95_s(self) -> float | None:
        """Return seconds, or None before the first duration of the run."""
        if not self._recent:
            return self._earlier_s
        own_s = sorted(self._recent)[math.ceil(0.95 * len(self._recent)) - 1]
        return own_s if len(self._recent) >= _ENOUGH or self._earlier_s is None else max(own_s, self._earlier_s)


@dataclass(frozen=True)
class StepTimes:
    """Durations of steps, evals and saves, with separate p95: rare evals would not show in a common p95."""

    steps: Durations
    evals: Durations
    saves: Durations

    @staticmethod
    def after(state: RunState | None) -> StepTimes:
        """Start an attempt with the durations in the last state of the previous attempt."""
        earlier = (state.step_p95_s, state.eval_p95_s, state.save_p95_s) if state else (None, None, None)
        return StepTimes(*map(Durations, earlier))

    def add_step(self, times: Mapping[str, float]) -> None:
        if "time/eval_s" in times:
            self.evals.add(times["time/eval_s"])
        apart_s = times.get("time/eval_s", 0.0) + times.get("time/checkpoint_s", 0.0)
        self.steps.add(times["time/step_s"] - apart_s)

    def step_and_save_s(self, *, evaluates: bool, num_saves: int = 1) -> float:
        """Return the seconds that one more step and its saves may take: p95 of each, and of an eval if it `evaluates`.

        Before an attempt's first step, step and eval count as 0: one slow step in the past must not stop all later
        attempts.
        """
        step_s = self.steps.p95_s or 0.0
        save_s = max(step_s, _SAVE_BEFORE_MEASURED_S) if self.saves.p95_s is None else self.saves.p95_s
        if not self.steps.is_measured:
            return save_s * num_saves
        eval_s = step_s if self.evals.p95_s is None else self.evals.p95_s
        return step_s + (eval_s if evaluates else 0.0) + save_s * num_saves


class Schedule:
    """Tells when checkpoints, exports or evals are due. `every.seconds` counts from `start_over`, or from creation."""

    def __init__(self, every: Every | None, length: TrainLength, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every or Every()
        self._length, self._clock = length, clock
        self._last_s = clock()

    def is_due(self, step: int, in_s: float = 0.0) -> bool:
        """Return whether an eval or a save is due after `step`, which ends `in_s` seconds from now."""
        every, epochs = self._every, self._length.epochs_done
        return (
            (every.steps is not None and step % every.steps == 0)
            or (every.epochs is not None and epochs(step) // every.epochs > epochs(step - 1) // every.epochs)
            or (every.seconds is not None and self._clock() + in_s - self._last_s >= every.seconds)
        )

    def start_over(self) -> None:
        """Count the seconds from now."""
        self._last_s = self._clock()


class StopRequest:
    """A request to stop, by a signal, the STOP file or the walltime. The run ends after the step and a checkpoint.

    A SIGINT after another stop signal ends the driver at once.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._signal: str | None = None
        self._ends_at = float(os.environ[ENDS_AT_VARIABLE]) if ENDS_AT_VARIABLE in os.environ else None
        self.listen()

    def listen(self) -> None:
        """Install the signal handlers. Call it again after `ray.init`, which replaces the handler of SIGTERM."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def reason(self, step_and_save_s: float) -> str | None:
        """Return why to stop now, or None. `step_and_save_s` is the time for one more step and a checkpoint."""
        if self._signal:
            return self._signal
        if self._run_dir.stop_marker.exists():
            return "the STOP file"
        needed_s = step_and_save_s + _MARGIN_S
        if self._ends_at is not None and self._ends_at - time.time() < needed_s:
            return f"the end of the allocation ({needed_s:.0f} s kept for the next step and a checkpoint)"
        return None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        left_s = None if self._ends_at is None else self._ends_at - time.time()
        if number == signal.SIGUSR1 and left_s is not None and left_s <= _EARLIEST_WARNING_S + _MARGIN_S:
            return  # Expected near the known end. Much earlier it means a shorter limit or a wrong clock.
        self._signal = f"signal {signal.Signals(number).name}"


def wait_for_ray(is_stopping: Callable[[], bool]) -> str | None:
    """Return the address of the run's Ray once it has started, or None when asked to stop."""
    path = Path(os.environ[RAY_ADDRESS_FILE_VARIABLE])
    while not path.exists():
        if is_stopping():
            return None
        time.sleep(_POLL_S)
        PULSE.beat()  # The supervisor has the deadline for Ray's start, so this wait counts as progress.
    return path.read_text()
