"""A place for one worker process: a thread that takes calls from the shared queue, has them run, and replaces
the worker when it is stuck or dead.

Consumes `QueuedCall`s; produces their results. Waits for its one worker, never longer than the call's
deadline; is unblocked by a call, or by `close`.

Each slot has a Pebble pool of one worker and not all slots one pool of many, because a Pebble pool shares a
pipe and its locks: a worker that dies idle, or while it holds a lock, breaks the pool for all (`All workers
expired`). The thread lives as long as the slot, as PDEATHSIG fires when the *thread* that spawned a worker
ends.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.grading import worker
from hpc_grpo.grading.spawning import LightSpawnContext
from hpc_grpo.grading.worker import Call, CallResult

_GRACE_S = 30.0
"""Pebble counts a deadline from when the worker took the call; a call not over so long after it never was
taken."""
_MAX_TRIES = 2
"""A worker that died before it took the call is no fault of the call; one that does so twice probably is."""


@dataclass(frozen=True)
class QueuedCall:
    """A call with its deadline; without a call, only the worker's imports are wanted."""

    call: Call | None
    timeout_s: float
    result: Future[CallResult] = field(default_factory=Future)


class WorkerSlot(threading.Thread):
    """Serves calls until it takes a None from the queue or is closed."""

    def __init__(self, names: Sequence[str], load_timeout_s: float, queue: SimpleQueue[QueuedCall | None]) -> None:
        super().__init__(name="reward-slot", daemon=True)
        self._names = tuple(names)
        self._load_timeout_s = load_timeout_s
        self._queue = queue
        self._closing = threading.Event()
        self._pool: Any = None
        self._running: Any = None
        self._is_loaded = False

    def run(self) -> None:
        while not self._closing.is_set() and (queued := self._queue.get()) is not None:
            try:
                result = self._serve(queued)
            except BaseException as error:  # noqa: BLE001 - whoever waits for this call must hear of it
                queued.result.set_exception(error)
            else:
                queued.result.set_result(result)
        self._drop_pool()

    def close(self) -> None:
        """Kill the worker, whatever it is at. Wake the thread with a None in the queue, then join it."""
        self._closing.set()
        running = self._running
        if running is not None:
            running.cancel()

    def _serve(self, queued: QueuedCall) -> CallResult:
        for _ in range(_MAX_TRIES):
            try:
                return self._attempt(queued)
            except RuntimeError:
                # Pebble's word for a pool whose worker died without a call in hand.
                self._drop_pool()
        return CallResult(failure=f"found no worker: {_MAX_TRIES} died before they took the call")

    def _attempt(self, queued: QueuedCall) -> CallResult:
        """Raises RuntimeError when the worker died before it took the call."""
        if not self._is_loaded:
            failure = self._load()
            if failure is not None:
                return CallResult(failure=failure)
        if queued.call is None:
            return CallResult()
        try:
            result: CallResult = self._execute(worker.run, queued.call, queued.timeout_s)
        except TimeoutError:
            return CallResult(failure=f"did not return within {queued.timeout_s:g} s; its process was killed")
        except ProcessExpired as error:
            return CallResult(failure=f"ended its process ({_exit_words(error.exitcode)})")
        return result

    def _load(self) -> str | None:
        """Import the rewards in a new worker, on a deadline of its own: no call pays for a slow import."""
        importing = f"Importing {', '.join(self._names)}"
        try:
            failure: str | None = self._execute(worker.load, self._names, self._load_timeout_s)
        except TimeoutError:
            return f"{importing} did not end within {self._load_timeout_s:g} s."
        except ProcessExpired as error:
            return f"{importing} ended the process ({_exit_words(error.exitcode)})."
        self._is_loaded = failure is None
        return failure

    def _execute(self, function: Callable[..., Any], argument: Any, timeout_s: float) -> Any:
        """Run `function(argument)` in the worker.

        Raises TimeoutError or ProcessExpired, after which the next worker is a new one, and RuntimeError when
        the pool broke; HpcGrpoError when the slot is closed meanwhile.
        """
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=1,
                initializer=worker.initialize,
                initargs=(os.getpid(),),
                context=LightSpawnContext(),
            )
        future = self._pool.schedule(function, args=(argument,), timeout=timeout_s)
        self._running = future
        if self._closing.is_set():
            future.cancel()
        try:
            return future.result(timeout=timeout_s + _GRACE_S)
        except (TimeoutError, ProcessExpired):
            self._is_loaded = False
            if not future.done():
                self._drop_pool()
            raise
        except CancelledError as error:
            raise HpcGrpoError("The reward pool was closed during a call.") from error
        finally:
            self._running = None

    def _drop_pool(self) -> None:
        """Kill the worker and forget its pool; the next call makes a new one."""
        pool, self._pool, self._is_loaded = self._pool, None, False
        if pool is not None:
            pool.stop()
            pool.join()


def _exit_words(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    return f"killed by {name}; out of memory?" if name == "SIGKILL" else f"killed by {name}"
