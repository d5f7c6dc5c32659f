"""When something that recurs is due: checkpoints, exports and evals, by steps, epochs or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpc_grpo.config.run import Every
from hpc_grpo.driver.length import TrainLength


class Schedule:
    """One for each kind; seconds count from the last time, and from the start of the driver before the first."""

    def __init__(self, every: Every | None, length: TrainLength, clock: Callable[[], float] = time.monotonic) -> None:
        self._every = every
        self._length = length
        self._clock = clock
        self._last_s = clock()

    def is_due(self, step: int, in_s: float = 0.0) -> bool:
        """Tell whether it is due after `step`, which ends in `in_s` seconds."""
        every, length = self._every or Every(), self._length
        is_step = every.steps is not None and step % every.steps == 0
        is_epoch = every.epochs is not None and (
            length.epochs_done(step) // every.epochs > length.epochs_done(step - 1) // every.epochs
        )
        is_time = every.seconds is not None and self._clock() + in_s - self._last_s >= every.seconds
        return is_step or is_epoch or is_time

    def start_over(self) -> None:
        """Count the seconds from now."""
        self._last_s = self._clock()
