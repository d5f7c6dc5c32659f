"""Collect signals by handlers, for the supervisor's loop to deal with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def outliving_the_warning() -> Iterator[None]:
    """Have SIGUSR1, the queue's warning of which this process would die by default, do nothing in the block.

    By a handler, since children would inherit that it is ignored.
    """
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, old)


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
