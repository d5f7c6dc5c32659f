"""A clock that stops while no thread reads it: in a process stopped by SIGSTOP, a suspended job or machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

LOOK_S = 5.0
"""Default interval between two reads by the clock's thread."""


class WakingClock:
    """Counts time, at most `most_s` between two reads. One idle thread reads it regularly; any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_s: float = 2 * LOOK_S) -> None:
        self._clock, self._most_s = clock, most_s
        self._counted = (0.0, clock())

    def read(self) -> float:
        """Return the seconds counted so far."""
        counted_s, looked_at = self._counted
        return counted_s + min(self._clock() - looked_at, self._most_s)

    def look(self) -> float:
        self._counted = (self.read(), self._clock())
        return self._counted[0]

    def keep_looking(self, every_s: float = LOOK_S) -> None:
        """Read the clock in a thread until this process ends."""

        def keep_on() -> None:
            while True:
                time.sleep(every_s)
                self.look()

        threading.Thread(target=keep_on, name="waking-clock", daemon=True).start()
