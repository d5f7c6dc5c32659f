"""The processes that hold the sessions of one environment, from the engine's side. Their program is `host.py`.

Runs in the engine's process, on its event loop. A session stays in its first process. A process that ends, or gives no
sign of life for longer than the limit of a call, is killed with its descendants. Its running call fails. Its other
sessions are lost, and restart in another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.episodes import Message
from hpc_grpo.episodes.host import MAX_LINE_BYTES
from hpc_grpo.errors import ConfigError, HpcGrpoError
from hpc_grpo.system.processes import hold_on, kill_group, start_program
from hpc_grpo.system.secret import environ_for
from hpc_grpo.system.signals import signal_name

_GRACE_S = 5.0
"""Extra seconds for a call: a process itself ends late calls of `async` environments."""
_TOGETHER_S = 0.5
"""Extra seconds for an agent: all hanging agents of a wave are late by then, and are ended together."""
_LOAD_S = 120.0
"""Seconds to import the environment: long on a shared file system with a cold cache."""
_MAX_PRINTED = 1 << 20


LeftS = Callable[[], float]
"""Returns the seconds that an agent has left."""


class EnvironmentFailedError(HpcGrpoError):
    """An environment raised, answered with an invalid value, or did not answer. Its episode is masked."""


class EnvironmentLostError(HpcGrpoError):
    """The process of a session ended: its episode restarts. `is_suspect` if this session's call was running."""

    def __init__(self, message: str, *, is_suspect: bool = False) -> None:
        super().__init__(message)
        self.is_suspect = is_suspect


@dataclass(frozen=True)
class Answer:
    """The answer of an environment to `reset` (messages and tools) or to `step`."""

    messages: list[Message]
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


class EnvironmentWorkers:
    """Plays sessions of one environment in `environment.num_workers` processes, started by their first session."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self._environment = environment
        self._processes: list[_Process | None] = [None] * environment.num_workers
        self._numbers = itertools.count()

    async def reset(self, row: Mapping[str, Any], seed: int) -> tuple[Session, Answer | None]:
        """Begin a session in the process with the fewest. Raises the errors of `Session.step`, and ConfigError if the
        environment cannot be created. For an agent nothing is called yet: there is no answer.
        """
        place = min(range(len(self._processes)), key=self._load)
        process = self._processes[place]
        if process is None or process.end is not None:
            process = self._processes[place] = _Process(self._environment)
        session = Session(process, next(self._numbers))
        try:
            await asyncio.shield(process.ready)
            return session, None if process.plays else await session.call("reset", row, seed)
        except BaseException:  # raised again
            session.end()
            raise

    def close(self) -> None:
        for process in filter(None, self._processes):
            process.kill("was ended with its engine")

    def _load(self, place: int) -> int:
        process = self._processes[place]
        return 0 if process is None or process.end is not None else process.num_sessions


class Session:
    """One episode's environment."""

    def __init__(self, process: _Process, number: int) -> None:
        self._process, self._number = process, number
        process.num_sessions += 1

    async def step(self, message: str) -> Answer:
        """Raises EnvironmentFailedError, or EnvironmentLostError if the process of the session ended."""
        return await self.call("step", message)

    async def call(self, method: str, *args: Any, left_s: LeftS | None = None) -> Answer:
        """Call a method. With `left_s`, the call is late when this reaches 0. Raises as `step` does."""
        answer = await self._process.ask(self._number, method, args, left_s)
        if (failure := answer.get("failure")) is not None:
            raise EnvironmentFailedError(f"{method} {failure}")
        return Answer(**answer)

    def end(self) -> None:
        """Leave the process. Its environment is then free for another session, unless the session failed."""
        self._process.num_sessions -= 1
        self._process.tell(self._number, "end")


class _Process:
    """A process of `host.main`, and the calls that wait for its answers, by number."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self.num_sessions = 0
        self.plays = False
        """Whether it runs agents; known when it is `ready`."""
        self._is_async = False
        self.end: str | None = None
        """How it ended."""
        self._environment = environment
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._started: list[int] = []
        self._left_s: dict[int, LeftS] = {}
        """For calls of agents."""
        self._blocker, self._blocked_at, self._freed_at = -1, "", -math.inf
        """The call that blocks its event loop, its position in the code, and when it stopped; `inf` while it blocks."""
        self._numbers = itertools.count()
        self._writer: asyncio.StreamWriter | None = None
        self._clock = asyncio.get_running_loop().time
        self._last_sign = self._clock()
        # Sets of texts must have one order in all processes, so that the same seed begins the same episode.
        environ = environ_for(environment.pass_env) | {"PYTHONHASHSEED": "0"}
        if environment.python is not None:
            environ = {name: value for name, value in environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        # A site's proxy would otherwise get requests for the engine's own address.
        no_proxy = ",".join(filter(None, [environ.get("no_proxy") or environ.get("NO_PROXY"), "127.0.0.1"]))
        environ |= {"no_proxy": no_proxy, "NO_PROXY": no_proxy}
        try:
            self._process, self._socket = start_program(
                "hpc_grpo.episodes.host", environ, subprocess.PIPE, environment.python
            )
        except OSError as error:
            raise ConfigError(
                f"environment.python = {environment.python} cannot be started: {error.strerror}. Give the path of a "
                f"Python, such as /path/to/venv/bin/python."
            ) from error
        threading.Thread(target=self._show_output, name="environment-output", daemon=True).start()
        self.ready = asyncio.create_task(self._start())

    async def ask(self, session: int, method: str, args: Any, left_s: LeftS | None = None) -> dict[str, Any]:
        """Return the answer to a call. Any answer of the process is a sign of life and restarts the call's time.

        With `left_s`, only `left_s` limits the call.
        """
        if self.end is not None:
            raise EnvironmentLostError(f"its process {self.end}")
        if not self._calls:
            self._last_sign = self._clock()
        number, patience_s = next(self._numbers), self._environment.timeout_s + _GRACE_S
        more_s = 0.0
        if left_s is not None:
            self._left_s[number], more_s = left_s, _TOGETHER_S
            left_s = partial(self._agent_left_s, number)
        left_s = left_s or (lambda: self._last_sign + patience_s - self._clock())
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._write([number, session, method, args])
        while not future.done():
            if (seconds := left_s() + more_s) <= 0.0:
                self._end_late(number)
            else:
                await asyncio.wait([future], timeout=min(seconds, patience_s))
        return await future

    def _agent_left_s(self, number: int) -> float:
        """Return the seconds that an agent has left; its full time if another agent blocked it."""
        freed_at = -math.inf if number == self._blocker else self._freed_at
        return max(self._left_s[number](), freed_at + self._environment.timeout_s - self._clock())

    def tell(self, session: int, method: str) -> None:
        if self.end is None and self._writer is not None:
            self._write([next(self._numbers), session, method, []])

    def kill(self, how: str, guilty: Collection[int] = ()) -> None:
        """Kill the process. The `guilty` calls fail; the sessions of other calls are lost."""
        if self.end is not None:
            return
        self.end = how
        kill_group(self._process.pid)
        for number, call in self._calls.items():
            is_suspect = not guilty and number in self._started
            if number in guilty:
                call.set_result({"failure": how})
            else:
                call.set_exception(EnvironmentLostError(f"its process {how}", is_suspect=is_suspect))
        self._calls.clear()
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.transport.abort()  # closing only the socket would leave its number in the loop

    def _end_late(self, number: int) -> None:
        if hold_on(self._process.pid) == "stopped":
            self.kill("was stopped (SIGSTOP)")
            return
        is_agent, is_blocked = number in self._left_s, self._freed_at == math.inf
        did = "neither ended nor asked the model" if is_agent else "did not end"
        guilty = {number} if is_agent else {self._blocker} if is_blocked else {*self._started[-1:]}
        does = "blocks the event loop" if self._is_async else "is"
        where = f"; it {does} at {self._blocked_at}" if is_blocked and self._blocker in guilty else ""
        if is_agent and not self._is_async:  # each has a thread, so a hanging agent does not block the others
            guilty |= {own for own in self._left_s if self._agent_left_s(own) <= 0.0}
        self.kill(f"{did} within {self._environment.timeout_s:g} s{where}", guilty)

    async def _start(self) -> None:
        """Connect, and wait until the environment is imported. Raises ConfigError if it cannot be created."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        self._write(self._environment.model_dump(mode="json"))
        name = self._environment.name
        try:
            line = await asyncio.wait_for(reader.readline(), _LOAD_S)
        except TimeoutError:
            self.kill(f"did not import {name} within {_LOAD_S:g} s")
            raise ConfigError(f"Environment {name!r} was not imported within {_LOAD_S:g} s.") from None
        if not line:
            await self._end_of(reader)
            raise EnvironmentLostError(f"its process {self.end}")
        ready = json.loads(line)
        if (refusal := ready.get("refused")) is not None:
            self.kill("was refused")
            raise ConfigError(f"Environment {name!r} cannot be made: {refusal}")
        self.plays, self._is_async = ready["plays"], ready["is_async"]
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError, ValueError):  # ValueError: a line beyond the limit
            while line := await reader.readline():
                self._last_sign, answer = self._clock(), json.loads(line)
                number = answer.pop("call")
                if (blocked_at := answer.get("blocks")) is not None:
                    self._blocker, self._blocked_at = number, blocked_at
                    self._freed_at = math.inf if blocked_at else self._clock()
                elif answer.pop("started", False):
                    self._started.append(number)
                else:
                    self._started.remove(number)
                    self._calls.pop(number).set_result(answer)
                    self._left_s.pop(number, None)
        await self._end_of(reader)

    async def _end_of(self, reader: asyncio.StreamReader) -> None:
        if self.end is None:
            kill_group(self._process.pid)  # it may have closed only the socket
            code = await asyncio.to_thread(self._process.wait)
            self.kill(f"ended (exit code {code})" if code >= 0 else f"ended (killed by {signal_name(-code)})")

    def _write(self, message: Any) -> None:
        assert self._writer is not None, "`ready` is awaited first"
        with contextlib.suppress(RuntimeError):  # the other side has closed the connection; `_read` will notice
            self._writer.write(json.dumps(message).encode() + b"\n")

    def _show_output(self) -> None:
        """Pass on the process's output, up to a limit: no flood fills a disk or blocks the process."""
        remaining = _MAX_PRINTED
        while data := self._process.stdout.read1(65536):
            if remaining > 0:
                sys.stderr.write(data[:remaining].decode(errors="replace"))
                sys.stderr.flush()
            if 0 < remaining <= len(data):
                sys.stderr.write("\nThe environment prints too much: further output is dropped.\n")
            remaining -= len(data)
        self._process.wait()


def first_answer(key: str, environment: EnvironmentConfig, row: Mapping[str, Any]) -> Answer | None:
    """Begin and end one session in a process. An agent is not called.

    Raises ConfigError if the environment cannot begin. `key` is the source's key in the config.
    """

    async def begin() -> Answer | None:
        workers = EnvironmentWorkers(environment)
        try:
            return (await workers.reset(row, 0))[1]
        finally:
            workers.close()

    try:
        return asyncio.run(begin())
    except (EnvironmentFailedError, EnvironmentLostError) as error:
        raise ConfigError(
            f"Environment {environment.name!r} cannot begin with the first row of {key}: {error}. Fix the "
            f"environment, environment.args, or the row."
        ) from error
