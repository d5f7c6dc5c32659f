"""The watchdog: ends a driver whose phase makes no progress, with the stacks of every process of the run kept.

The driver only says that it is stuck, in a file of the attempt: the supervisor reads it, has every node agent ask
its processes for their Python stacks (`dump_stacks_on_signal`), and then kills the driver. Where the file cannot be
written (a checkpoint that waits on a full disk is such a phase) the driver prints its own stacks and ends itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from hpc_grpo.errors import EXIT_CRASH
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE, STUCK_NAME
from hpc_grpo.run.files import write_atomic

_POLL_S = 1.0


class Watchdog:
    """Watches the timer's phase from a thread of its own, until `close`."""

    def __init__(self, timer: StepTimer, deadlines_s: Mapping[str, float]) -> None:
        """`deadlines_s`: the longest that each phase of the timer may take; other phases have no limit."""
        self._timer = timer
        self._deadlines_s = deadlines_s
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            name, begun = self._timer.current
            limit_s = self._deadlines_s.get(name)
            if limit_s is not None and time.monotonic() - begun > limit_s:
                say_stuck(f"The driver was in {name!r} for more than deadlines.{name}_s = {limit_s:g}.")
                return


def say_stuck(why: str) -> None:
    """Tell the supervisor, which ends this process; where it cannot be told, this process ends at once."""
    with contextlib.suppress(OSError):
        print(f"error: {why}", flush=True)
    if folder := os.environ.get(ATTEMPT_DIR_VARIABLE):
        try:
            write_atomic(Path(folder) / STUCK_NAME, why)
        except OSError:
            faulthandler.dump_traceback(all_threads=True)
            os._exit(EXIT_CRASH)  # from a thread, and past whatever is stuck
