"""Signals as data: collected by handlers, dealt with by the supervisor's loop."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from types import FrameType

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Signals(AbstractContextManager["Signals"]):
    """Collects signals for the loop, and puts the old handlers back."""

    def __init__(self) -> None:
        self.pending: list[int] = []
        self.resized = False

    def __enter__(self) -> Signals:
        self._old = {sig: signal.signal(sig, self._note) for sig in (*_FORWARDED, signal.SIGWINCH)}
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._old.items():
            signal.signal(sig, handler)

    def _note(self, sig: int, _frame: FrameType | None) -> None:
        if sig == signal.SIGWINCH:
            self.resized = True
        else:
            self.pending.append(sig)
