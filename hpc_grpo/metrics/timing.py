"""Times the phases of a step, and estimates when the run will end. Runs in the driver's loop."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BETWEEN = "between two phases"
_RECENT_STEPS = 20


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
