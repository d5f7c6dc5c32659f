"""A SIGTERM to a node agent: of a job that is cancelled, or of one that is preempted and has a while to leave.

The agent cannot tell them apart. It reports the signal, and the supervisor, which asks the queue, has it hold or not.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

_ANSWER_S = 3.0
"""A supervisor that lives answers the report of a SIGTERM within this time."""
_SAME_SIGNAL_S = 1.0
"""Two within this time are one, sent by two ways."""


class EndNotice:
    """A SIGTERM to this process, and what the supervisor makes of it.

    Behind that of a job that is cancelled comes SIGKILL within seconds: `is_final`.
    Behind that of a job that is preempted comes nothing for minutes, in which the run can be saved.
    """

    def __init__(self) -> None:
        self.is_final = False
        """SIGKILL is near: there is just time to tidy up."""
        self._came_at: float | None = None
        self._is_news = False
        self._holds = False
        self._is_let_go = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def take_news(self) -> bool:
        """Return True once, after the first signal."""
        news, self._is_news = self._is_news, False
        return news

    def hold(self) -> None:
        self._holds = True

    def let_go(self) -> None:
        """Take the signal for final, also where it is still to come; without one there is time."""
        self._holds, self._is_let_go = False, True
        self.is_final |= self._came_at is not None

    def ends_agent(self) -> bool:
        """Tell whether to end now: the supervisor has not answered in time, or SIGKILL is near."""
        if self._came_at is not None and not self._holds:
            self.is_final |= time.monotonic() - self._came_at > _ANSWER_S
        return self.is_final

    def _on_sigterm(self, _signal: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._came_at is None:
            self._came_at, self._is_news = now, True
            self.is_final |= self._is_let_go
        elif now - self._came_at > _SAME_SIGNAL_S:
            self.is_final = True
