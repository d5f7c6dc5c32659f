"""The thread that owns an engine: it steps it, and runs everything else that touches it between two steps.

Waits for work when idle; unblocked by `call`. Weight updates are calls, so none can fall inside a step.
"""

from __future__ import annotations

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from hpc_grpo.run.pulse import PULSE
from hpc_grpo.system.usage import METER

_SAMPLING = "sampling"


class Steppable(Protocol):
    """An engine, as the loop drives it."""

    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def fail(self, error: BaseException) -> None:
        """Raise this error from every call that still waits for a result."""


S = TypeVar("S", bound=Steppable)
T = TypeVar("T")


class StepLoop(Generic[S]):
    """Runs `make()` and then the steps of the engine it returned, on a thread of its own."""

    def __init__(self, make: Callable[[], S]) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[S], Any], Future[Any]]] = queue.SimpleQueue()
        self._engine: Future[S] = Future()
        threading.Thread(target=self._run, args=(make,), name="engine-steps", daemon=True).start()

    def wait_ready(self) -> S:
        """Return the engine; raises what `make` raised."""
        return self._engine.result()

    def call(self, function: Callable[[S], T]) -> Future[T]:
        """Run `function(engine)` on the thread between two steps; its future raises what `make` raised."""
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future

    def _run(self, make: Callable[[], S]) -> None:
        try:
            self._engine.set_result(make())
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the engine
            self._engine.set_exception(error)
            while True:
                self._run_calls(wait=True)
        engine = self._engine.result()
        while True:
            self._run_calls(wait=not engine.has_work())
            if not engine.has_work():
                continue
            if PULSE.work != _SAMPLING:
                PULSE.turn_to(_SAMPLING)
            try:
                with METER.busy():
                    engine.step()
                PULSE.beat()
            except BaseException as error:  # noqa: BLE001 - raised by every caller that waits
                traceback.print_exception(error)  # callers see the cause alone
                engine.fail(error)

    def _run_calls(self, *, wait: bool) -> None:
        """Run all calls in the queue; `wait` for the first. Of the sampling's pulse neither is part."""
        while True:
            if wait:
                PULSE.turn_to("")
            try:
                function, future = self._calls.get(block=wait)
            except queue.Empty:
                return
            wait = False
            PULSE.turn_to("")
            try:
                future.set_result(function(self._engine.result()))
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                future.set_exception(error)
