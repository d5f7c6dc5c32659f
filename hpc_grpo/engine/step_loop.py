"""The thread that owns an engine: it steps the engine, and runs everything else that touches it between two steps.

Waits for work when idle; unblocked by `call`. Weight updates are calls. Before a call the thread drains the engine, so
no call meets a step in flight, and every token is one of the weights that its step began with.
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

    def drain(self) -> None:
        """Finish the steps in flight, and begin no other."""

    def fail(self, error: BaseException) -> None:
        """Raise this error from every call that waits for a result."""


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
        engine = None
        try:
            engine = make()
            self._engine.set_result(engine)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the engine
            self._engine.set_exception(error)
        while True:
            self._run_calls(wait=engine is None or not engine.has_work())
            if engine is None or not engine.has_work():
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
        """Run all calls in the queue; `wait` for the first. Draining counts as sampling for the pulse, calls do not."""
        while True:
            if wait:
                PULSE.turn_to("")
            try:
                function, future = self._calls.get(block=wait)
            except queue.Empty:
                return
            wait = False
            try:
                engine = self._engine.result()
                try:
                    engine.drain()
                except BaseException as error:
                    engine.fail(error)
                    raise
                PULSE.turn_to("")
                future.set_result(function(engine))
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                future.set_exception(error)
