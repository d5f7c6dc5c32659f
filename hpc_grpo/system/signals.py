"""Collect signals by handlers, for the supervisor's loop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that request an orderly end. SIGHUP comes when a terminal or its ssh connection closes."""


def end_signals() -> list[int]:
    """Return the signals that request the end, without signals that the process ignores, such as under nohup."""
    return [number for number in END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def signal_name(number: int) -> str:
    """Return the name of a signal, or its number if it has no name.

    >>> signal_name(9), signal_name(127)
    ('SIGKILL', 'signal 127')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def outliving_the_warning() -> Iterator[None]:
    """Ignore SIGUSR1 in the block: the queue's warning, which would end this process by default.

    Uses a handler, because children would inherit an ignored signal.
    """
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, old)


class Signals:
    """Collects signals for the loop, and restores the old handlers at its exit."""

    def __init__(self) -> None:
        self.pending: list[int] = []

    def __enter__(self) -> Signals:
        taken = [*end_signals(), signal.SIGINT, signal.SIGUSR1]
        self._old = {sig: signal.signal(sig, self._note) for sig in taken}
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._old.items():
            signal.signal(sig, handler)

    def _note(self, sig: int, _frame: FrameType | None) -> None:
        self.pending.append(sig)
