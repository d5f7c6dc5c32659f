"""Requests to stop before the run is complete: by a signal, by the STOP file, or by the clock.

Importing it loads neither Ray nor torch: the driver asks while it still waits for Ray to come up.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from hpc_grpo.run.contract import ENDS_AT_VARIABLE, RAY_ADDRESS_FILE_VARIABLE, WARNING_BEFORE_END_S
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.pulse import PULSE

_POLL_S = 0.25
_MARGIN_S = 30.0
_EARLIEST_WARNING_S = WARNING_BEFORE_END_S + 60.0


class StopRequest:
    """Asked once, it ends the run after the step in progress and a checkpoint; asked twice, at once."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._asked: str | None = None
        self._ends_at = float(os.environ[ENDS_AT_VARIABLE]) if ENDS_AT_VARIABLE in os.environ else None
        self.listen()

    def listen(self) -> None:
        """Take the signals. Call it again after `ray.init`, whose crash handler takes SIGTERM for itself."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._handle)

    def reason(self, step_and_save_s: float) -> str | None:
        """Say why to stop now, or return None to go on. `step_and_save_s`: what one more step and a checkpoint need."""
        if self._asked:
            return self._asked
        if self._run_dir.stop_marker.exists():
            return "the STOP file"
        needed_s = step_and_save_s + _MARGIN_S
        if self._ends_at is not None and self._ends_at - time.time() < needed_s:
            return f"the end of the allocation ({needed_s:.0f} s kept for the next step and a checkpoint)"
        return None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGUSR1 and self._expects_warning():
            return
        self._asked = f"signal {signal.Signals(number).name}"

    def _expects_warning(self) -> bool:
        """Say whether the warning is of the end as known: much earlier, the time limit was cut or a clock is wrong."""
        return self._ends_at is not None and self._ends_at - time.time() <= _EARLIEST_WARNING_S + _MARGIN_S


def wait_for_ray(is_asked_to_stop: Callable[[], bool]) -> str | None:
    """Return the address of the run's Ray, or None when asked to stop. The supervisor ends this process without one."""
    path = Path(os.environ[RAY_ADDRESS_FILE_VARIABLE])
    while not path.exists():
        if is_asked_to_stop():
            return None
        time.sleep(_POLL_S)
        PULSE.beat()  # whoever brings Ray up has a deadline
    return path.read_text()
