"""One thread owns the vLLM engine: it steps it, and runs everything else that touches it between two steps.

Waits for work when idle; unblocked by `submit` or `call`. Because updates are calls, a weight update can never
fall inside a step, and requests in flight simply continue after it.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Steppable(Protocol):
    """What the loop drives."""

    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Give every caller that still waits for a result this error."""


class StepLoop:
    """Runs `make()` and then its product's steps on a thread of its own."""

    def __init__(self, make: Callable[[], Steppable]) -> None:
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._ready: Future[Steppable] = Future()
        threading.Thread(target=self._run, args=(make,), name="engine-steps", daemon=True).start()

    def wait_ready(self) -> Steppable:
        return self._ready.result()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the thread between two steps."""
        future: Future[T] = Future()
        self._commands.put((function, future))
        return future

    def _run(self, make: Callable[[], Steppable]) -> None:
        try:
            engine = make()
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the engine
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine)
        while True:
            self._run_commands(wait=not engine.has_work())
            if not engine.has_work():
                continue
            try:
                engine.step()
            except BaseException as error:  # noqa: BLE001 - handed to every waiting caller
                traceback.print_exception(error)  # callers are told the cause alone
                engine.fail(error)

    def _run_commands(self, *, wait: bool) -> None:
        """Run all that was asked for; `wait` for the first of it."""
        while True:
            try:
                function, future = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                future.set_exception(error)
