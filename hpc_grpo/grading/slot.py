"""A place for one worker process, and the thread that serves it.

Runs in the grader's process, one thread per worker; the worker's own side is `worker`. Waits for its one worker, never
longer than a call's deadline.

Workers are neither multiprocessing's nor Pebble's. Their pools share a pipe and its locks, so a worker that dies while
it holds one breaks the pool for all; and a spawned process imports the parent's main module first, which in a Ray
actor is Ray. Here each worker has a socket of its own, and starts with the registry's imports alone.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import psutil

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.grading.worker import Call, CallResult, Preparation
from hpc_grpo.system.processes import hold_on
from hpc_grpo.system.signals import signal_name
from hpc_grpo.system.usage import Meter, Usage

_MAX_TRIES = 2
"""A worker that is lost to something else than the call is no fault of the call; a second one probably is."""
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv.pop().split(chr(10)); "
    "from hpc_grpo.grading.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
"""Takes the parent's path, on which the rewards were found, and not what -m would put first.

-m would also make the worker's module `__main__`, whose classes cannot be unpickled here.
"""


class _WorkerLostError(Exception):
    """The worker ended or was stopped; `how`, and `is_calls_fault` where the next one would fare no better."""

    def __init__(self, how: str, *, is_calls_fault: bool) -> None:
        self.how = how
        self.is_calls_fault = is_calls_fault


@dataclass(frozen=True)
class QueuedCall:
    """A call with its deadline."""

    call: Call | Preparation
    timeout_s: float
    result: Future[CallResult] = field(default_factory=Future)


class WorkerSlot(threading.Thread):
    """Serves calls; a thread that lives as long as the slot, since a worker's PDEATHSIG fires when its starter ends."""

    def __init__(
        self,
        names: Sequence[str],
        load_timeout_s: float,
        queue: SimpleQueue[QueuedCall | None],
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(name="reward-slot", daemon=True)
        self._names = tuple(names)
        self._load_timeout_s = load_timeout_s
        self._queue = queue
        self._environ = environ
        self._worker: _WorkerProcess | None = None
        self._closed = False
        self._lock = threading.Lock()
        """Held to start a worker, to forget it, and to close: none is started or killed twice."""

    def run(self) -> None:
        while not self._closed and (queued := self._queue.get()) is not None:
            try:
                result = self._serve(queued)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for this call
                queued.result.set_exception(error)
            else:
                queued.result.set_result(result)
        self._end_worker()

    def close(self) -> None:
        """Kill the worker, whatever it does. Wake the thread with a None in the queue, then join it."""
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.kill()

    def usage(self) -> Usage | None:
        """Return what the worker has used since the call before; None where none is, or one just starts or ends."""
        if not self._lock.acquire(blocking=False):  # a killed worker may take long to end, and all grading would wait
            return None
        try:
            return None if self._worker is None else self._worker.usage()
        finally:
            self._lock.release()

    def _serve(self, queued: QueuedCall) -> CallResult:
        """Run the call in the worker. Raises HpcGrpoError when the slot is closed meanwhile."""
        for _ in range(_MAX_TRIES):
            try:
                return self._attempt(queued)
            except _WorkerLostError as error:
                lost = error
        return CallResult(failure=f"{lost.how}, {_MAX_TRIES} times")

    def _attempt(self, queued: QueuedCall) -> CallResult:
        """Run the call once. Raises _WorkerLostError when its worker was lost for no fault of the call."""
        if self._worker is None and (failure := self._start_worker()) is not None:
            return CallResult(failure=failure)
        try:
            return self._ask(queued.call, queued.timeout_s)  # type: ignore[no-any-return]
        except TimeoutError:
            failure = f"did not return within {queued.timeout_s:g} s; its process was killed"
            return CallResult(failure=failure, timed_out=True)
        except _WorkerLostError as error:
            if not error.is_calls_fault:
                raise
            return CallResult(failure=error.how)

    def _start_worker(self) -> str | None:
        """Start a worker and import the rewards, with a deadline of their own; returns what went wrong, or None.

        Raises _WorkerLostError when it was lost for no fault of the rewards.
        """
        with self._lock:
            if self._closed:
                raise HpcGrpoError("The reward pool was closed during a call.")
            self._worker = _WorkerProcess(self._environ)
        importing = f"Importing {', '.join(self._names)}"
        try:
            failure: str | None = self._ask(self._names, self._load_timeout_s)
        except TimeoutError:
            return f"{importing} did not end within {self._load_timeout_s:g} s."
        except _WorkerLostError as error:
            if not error.is_calls_fault:
                raise
            return f"{importing}: {error.how}."
        if failure is not None:
            self._end_worker()
        return failure

    def _ask(self, message: Any, timeout_s: float) -> Any:
        """Return the worker's answer. Raises TimeoutError, _WorkerLostError, or HpcGrpoError when closed."""
        assert self._worker is not None
        try:
            return self._worker.ask(message, timeout_s)
        except TimeoutError:
            was_stopped = self._worker.is_stopped()
            self._end_worker()
            if was_stopped:
                raise _WorkerLostError("its process was stopped (SIGSTOP)", is_calls_fault=False) from None
            raise
        except EOFError as error:
            exit_code = self._end_worker()
            if self._closed:
                raise HpcGrpoError("The reward pool was closed during a call.") from error
            took_message = bool(error.args[0])
            raise _WorkerLostError(
                f"ended its process ({_how(exit_code)})",
                is_calls_fault=took_message and exit_code not in _FROM_OUTSIDE,
            ) from error

    def _end_worker(self) -> int:
        """Kill the worker, if there is one, and forget it; returns its exit code."""
        with self._lock:
            worker, self._worker = self._worker, None
            return 0 if worker is None else worker.end()


class _WorkerProcess:
    """A process of `worker.main` in its own session, with a socket: what a reward prints cannot fall into an answer."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(os.dup(self._socket.fileno()))
        flags = [flag for flag, on in (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)) if on]
        arguments = [str(theirs.fileno()), str(os.getpid()), "\n".join(sys.path)]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, "-c", _PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=environ,
            )
        self._meter = Meter(self._process.pid)

    def ask(self, message: Any, timeout_s: float) -> Any:
        """Return the answer to a message. Each sign of progress gives the worker `timeout_s` again.

        Raises TimeoutError when they are over. Raises EOFError when the worker ends before, with whether it had taken
        the message as its argument.
        """
        took_message = False
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            seconds, part = divmod(max(timeout_s, 1e-3), 1.0)
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(part * 1e6)))
        try:
            self._connection.send(message)
            while not (answer := self._connection.recv_bytes()):
                took_message = True
            return pickle.loads(answer)
        except BlockingIOError as error:
            raise TimeoutError from error
        except (EOFError, ConnectionError) as error:
            raise EOFError(took_message) from error

    def is_stopped(self) -> bool:
        return hold_on(self._process.pid) == "stopped"

    def usage(self) -> Usage | None:
        try:
            return self._meter.read()
        except psutil.NoSuchProcess:  # it has died, and its thread is about to see it
            return None

    def kill(self) -> None:
        """Kill the worker with all that its rewards have started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> int:
        """Kill what is left of the worker; returns its exit code, which is its own if it had begun to end."""
        self.kill()
        self._connection.close()
        self._socket.close()
        return self._process.wait()


def _how(exit_code: int) -> str:
    if exit_code >= 0:
        return f"exit code {exit_code}"
    return f"killed by {signal_name(-exit_code)}" + ("; out of memory?" if exit_code == -signal.SIGKILL else "")
