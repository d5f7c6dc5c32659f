"""The program of an environment's process, which plays many sessions. The engine's side is `workers.py`.

Reads calls from a socket and writes answers to it, one line of JSON each. Calls of `async` environments run in
parallel. Other calls run one after another, each with its session's state of `random` and `numpy.random`. A `play` that
is not `async` has its own thread, because it waits for the model while other agents work.

Also runs under the interpreter of `environment.python`, from Python 3.10 on. This file, and the modules of the package
that it imports, therefore need only the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import numbers
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any

from hpc_grpo.episodes import OWN_METRICS, Turn, as_messages
from hpc_grpo.episodes.builtin import environment_of
from hpc_grpo.errors import ConfigError, HpcGrpoError, described
from hpc_grpo.system.processes import tie_to_parent

MAX_LINE_BYTES = 16 << 20
_BLOCKED_S = 0.5
"""Seconds without progress after which an event loop counts as blocked."""
_SLICES = 20
"""Number of parts of an `async` call's deadline (`_within`)."""
_MAX_CHARACTERS = 1_000_000
_MAX_POOL_THREADS = 10_000
_CALL = ContextVar[int | None]("call", default=None)
"""The number of the call that runs, also in tasks that the call's environment creates."""


class Host:
    """Creates environments and keeps one for each open session. A later session reuses an idle environment."""

    def __init__(self, settings: Mapping[str, Any], connection: socket.socket, writer: asyncio.StreamWriter) -> None:
        self._connection, self._writer, self._timeout_s = connection, writer, settings["timeout_s"]
        self._new = partial(environment_of, settings["name"], settings["args"])
        self._writing = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._idle: list[Any] = []

    def make(self) -> dict[str, Any]:
        """Create the first environment. Return {"plays", "is_async"}, or {"refused": the reason}."""
        try:
            self._idle.append(environment := self._new())
            plays = callable(getattr(environment, "play", None))
            for method in () if plays else ("reset", "step"):
                if not callable(getattr(environment, method, None)):
                    raise ConfigError(f"it has no method {method}. Add it, or a method play (docs/environments.md)")
        except BaseException as error:  # noqa: BLE001 - a user's class may raise anything; it becomes an answer
            return {"refused": str(error) if isinstance(error, HpcGrpoError) else described(error)}
        is_async = inspect.iscoroutinefunction(environment.play if plays else environment.step)
        return {"plays": plays, "is_async": is_async}

    async def serve(self, call: int, session: int, method: str, args: list[Any]) -> None:
        """Answer one call: `reset` opens a session, `step` continues it, `end` closes it without an answer.

        `play` opens a session and plays it to its end. The engine's side limits the time of `play`.
        """
        if method == "end":
            if (own := self._sessions.pop(session, None)) is not None:
                self._idle.append(own.environment)
            return
        begun, seconds = time.monotonic(), self._timeout_s
        try:
            if method != "step":
                self._sessions[session] = _Session(self._idle.pop() if self._idle else self._new(), args[1])
            own = self._sessions[session]
            value = own.call(method, *args)
            if inspect.isawaitable(value):
                value = await (value if method == "play" else _within(value, seconds))
            elif time.monotonic() - begun > seconds:
                raise _LateError
            answer = checked(value, method)
            if method == "reset":
                answer["tools"] = list(getattr(own.environment, "tools", None) or ())
            line = _line(call=call, **answer)
        except BaseException as error:  # noqa: BLE001 - an environment may raise anything; it becomes an answer
            self._sessions.pop(session, None)
            is_late = isinstance(error, _LateError)
            line = _line(call=call, failure=f"did not end within {seconds:g} s" if is_late else described(error))
        self.write(line)

    def write(self, line: bytes) -> None:
        with self._writing:
            self._writer.write(line)

    def watch(self, loop: asyncio.AbstractEventLoop, loop_thread: int) -> None:
        """Report which call blocks the event loop, and where; later report that the loop is free. Runs in a thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            while True:
                heard = threading.Event()
                loop.call_soon_threadsafe(heard.set)
                call = None if heard.wait(_BLOCKED_S) else getattr(asyncio.current_task(loop), "call", None)
                if call is not None:
                    frame = sys._current_frames()[loop_thread]
                    line = _line(call=call, blocks=f"{frame.f_code.co_filename}:{frame.f_lineno}")
                    with self._writing, contextlib.suppress(BlockingIOError):
                        if not self._writer.transport.get_write_buffer_size():  # else it would be inside another line
                            self._connection.send(line)
                    loop.call_soon_threadsafe(self.write, _line(call=call, blocks=""))
                heard.wait()
                time.sleep(_BLOCKED_S)


class _LateError(Exception):
    """A call took longer than its deadline. Not TimeoutError, which an environment may raise itself."""


class _Task(asyncio.Task[Any]):
    """A task that knows its call."""

    def __init__(self, coroutine: Any, **options: Any) -> None:
        super().__init__(coroutine, **options)
        self.call = _CALL.get()


async def _within(value: Awaitable[Any], seconds: float) -> Any:
    """Return the value of an awaitable. Raises _LateError after `seconds`.

    The deadline has `_SLICES` parts. Another call that blocks the event loop uses up at most one part.
    """
    task = asyncio.ensure_future(value)
    for _ in range(_SLICES):
        done, _ = await asyncio.wait([task], timeout=seconds / _SLICES)
        if done:
            return task.result()
    task.cancel()
    await asyncio.wait([task])
    raise _LateError


def _line(**values: Any) -> bytes:
    return json.dumps(values).encode() + b"\n"


class _Session:
    """An environment with its session's random numbers."""

    def __init__(self, environment: Any, seed: int) -> None:
        self.environment, self._seed = environment, seed
        self._random, self._numpy_random = random.Random(seed).getstate(), None

    def call(self, method: str, *args: Any) -> Any:
        function = getattr(self.environment, method)
        if inspect.iscoroutinefunction(function):
            return function(*args)
        if method == "play":
            return in_thread(partial(function, *args))
        random.setstate(self._random)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.set_state(self._numpy_random or numpy.random.RandomState(self._seed % 2**32).get_state())
        value = function(*args)
        self._random = random.getstate()
        if (numpy := sys.modules.get("numpy")) is not None:
            self._numpy_random = numpy.random.get_state()
        return value


def in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Call a function in a new daemon thread. In a pool, hanging calls would use up all threads and delay its end."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - it may raise anything; SystemExit must not end the process
            future.set_exception(error if isinstance(error, Exception) else RuntimeError(f"it raised {error!r}"))

    threading.Thread(target=run, daemon=True).start()
    return asyncio.wrap_future(future)


def checked(value: Any, method: str = "step") -> dict[str, Any]:
    """Return the result of a method as JSON. Raises ValueError for an invalid value."""
    if method == "reset":
        return {"messages": _checked_messages(value)}
    if method == "play" and _is_finite(value):
        value = Turn(reward=value)
    if not isinstance(value, Turn):
        what = "a finite number or a hpc_grpo.Turn" if method == "play" else "a hpc_grpo.Turn"
        raise ValueError(f"{method} must return {what}, not {value!r:.200} of type {type(value).__name__}")
    if method == "play":
        value = replace(value, observation=None, done=True)
    messages = _checked_messages(value.observation)
    if not messages and not value.done:
        raise ValueError("a Turn that is not done needs an observation for the model")
    if not _is_finite(value.reward):
        raise ValueError(f"the reward of a Turn must be a finite number, not {value.reward!r:.200}")
    if not isinstance(value.metrics, Mapping) or not all(map(_is_finite, value.metrics.values())):
        raise ValueError(f"the metrics of a Turn must be finite numbers by name, not {value.metrics!r:.200}")
    metrics = {str(name): float(own) for name, own in value.metrics.items()}
    if taken := [name for name in metrics if name.partition("/")[0] in OWN_METRICS]:
        raise ValueError(
            f"a metric of a Turn has the name {taken[0]!r}, which hpc-grpo measures itself as episode/{taken[0]}; give "
            f"it another name than {', '.join(sorted(OWN_METRICS))}"
        )
    return {"messages": messages, "reward": float(value.reward), "done": bool(value.done), "metrics": metrics}


def _checked_messages(value: Any) -> list[dict[str, Any]]:
    messages = [dict(message) for message in as_messages(value)]
    text = json.dumps(messages, ensure_ascii=False)
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(f"an observation of {len(text):,} characters is longer than {_MAX_CHARACTERS:,}")
    text.encode()  # half a character, which no tokenizer takes, raises UnicodeEncodeError
    return messages


def _is_finite(value: Any) -> bool:
    with contextlib.suppress(OverflowError):  # an integer beyond every float
        return isinstance(value, numbers.Real) and math.isfinite(value)
    return False


async def _serve(connection: socket.socket, settings: Mapping[str, Any]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=MAX_LINE_BYTES)
    loop, host = asyncio.get_running_loop(), Host(settings, connection, writer)
    loop.set_task_factory(lambda loop, coroutine, **options: _Task(coroutine, loop=loop, **options))
    # Agents may wait for the model in `asyncio.to_thread`, each in a thread of its own.
    loop.set_default_executor(ThreadPoolExecutor(_MAX_POOL_THREADS))
    threading.Thread(target=host.watch, args=(loop, threading.get_ident()), daemon=True).start()
    host.write(_line(**(made := host.make())))
    tasks: set[asyncio.Task[None]] = set()
    while "refused" not in made and (line := await reader.readline()):
        call, *asked = json.loads(line)
        _CALL.set(call)
        tasks.add(task := asyncio.create_task(host.serve(call, *asked)))
        task.add_done_callback(tasks.discard)
    await writer.drain()


def main(descriptor: int, parent_pid: int) -> None:
    """Play the sessions requested at a socket until the parent closes it. The first line has the settings."""
    tie_to_parent(parent_pid, signal.SIGKILL)
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    settings = json.loads(connection.makefile("rb", buffering=0).readline())  # reads no byte after the line
    limit = int(settings["memory_gib"] * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(ConnectionError):
        asyncio.run(_serve(connection, settings))
