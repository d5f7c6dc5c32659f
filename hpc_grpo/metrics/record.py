"""The record of one step, which the driver gives to every sink; the times of its phases; an episode as text."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hpc_grpo.run.pulse import ASKED_AGAIN

REWARD = "reward/mean"
PASS_AT_1 = "eval/pass@1"
BETWEEN = "between two phases"
_RECENT_STEPS = 20

_PHASES = dict.fromkeys(("inputs", "connect", "start", "resume", "weights"), "loading the model")
_PHASES |= {"generate_wait": "generate", ASKED_AGAIN: "generate again"}


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one training step and its place in the run.

    `step` and `epoch` count from 1; step 0 is the eval before the first step. `metrics` lacks a name
    that has no value in this step. `rollouts` are the lines of rollouts/step_N.jsonl. `time_s` is in unix seconds.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    attempt: int = 1
    epoch: int = 1
    total_epochs: int = 1
    rollouts: Sequence[Mapping[str, Any]] = ()
    time_s: float = field(default_factory=time.time)


def phase_name(work: str) -> str:
    """Return the name of a driver phase for users. `work` is its name in metrics and in the pulse."""
    return _PHASES.get(work, work)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step's phases by `phase_name`, without the step's total and the remaining time.

    >>> phase_seconds({"time/step_s": 4.0, "time/train_s": 3.0, "time/eta_s": 99.0, "lr": 0.1})
    {'train': 3.0}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith("time/") and name not in ("time/step_s", "time/eta_s") and not math.isnan(value):
            phase = phase_name(name.removeprefix("time/").removesuffix("_s"))
            found[phase] = found.get(phase, 0.0) + value
    return found


def played(turns: Sequence[Mapping[str, Any]]) -> str:
    """Return an episode's turns, in the form of rollout files, as text for a terminal.

    >>> print(played([{"text": "5", "reward": 0}, {"observation": "No.", "text": "7", "reward": 1.0}]))
    [turn 1, reward 0] 5
    [environment] No.
    [turn 2, reward 1] 7
    """
    lines = []
    for number, turn in enumerate(turns, 1):
        lines += [f"[environment] {turn['observation']}"] if number > 1 else []
        lines.append(f"[turn {number}, reward {turn['reward']:g}] {turn['text'].strip()}")
    return "\n".join(lines)


class StepTimer:
    """Times the named phases of a step. `on_phase` receives each phase that begins, and `BETWEEN` after a phase.

    >>> clock = iter([0.0, 1.0, 3.0, 4.0])
    >>> timer = StepTimer(clock=lambda: next(clock))
    >>> with timer.phase("train"):
    ...     pass
    >>> timer.finish_step()
    {'time/train_s': 2.0, 'time/step_s': 4.0}
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, on_phase: Callable[[str], None] = lambda _name: None
    ) -> None:
        self._clock, self._on_phase = clock, on_phase
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.start_over()

    def start_over(self) -> None:
        """Begin the first step now, and forget all times so far."""
        self._recent.clear()
        self._begin_step()

    def _begin_step(self) -> None:
        self._step_started = self._clock()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to `time/<name>_s`; a phase may be entered several times in a step."""
        started = self._clock()
        self._on_phase(name)
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + self._clock() - started
            self._on_phase(BETWEEN)

    def finish_step(self) -> dict[str, float]:
        """Return `time/<phase>_s` of every phase and the seconds of the step, `time/step_s`. Begin the next step."""
        times, began = {f"time/{name}_s": seconds for name, seconds in self._phases.items()}, self._step_started
        self._begin_step()
        self._recent.append(self._step_started - began)
        return {**times, "time/step_s": self._recent[-1]}

    def eta_s(self, num_remaining_steps: int) -> float | None:
        """Estimate the seconds to the end of the run; None before the first step has ended."""
        # Not the mean: it would jump in a step with an eval or a checkpoint.
        return statistics.median(self._recent) * num_remaining_steps if self._recent else None
