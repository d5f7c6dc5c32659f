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
from typing import Any

from hpc_grpo.config.rollout import EnvironmentConfig
from hpc_grpo.episodes import Message
from hpc_grpo.episodes.host import MAX_LINE_BYTES
from hpc_grpo.errors import ConfigError, EnvironmentLateError, HpcGrpoError, LaunchError
from hpc_grpo.system.processes import hold_on, kill_group, start_program
from hpc_grpo.system.secret import environ_for
from hpc_grpo.system.signals import signal_name

_GRACE_S = 5.0
"""Extra seconds for a call, so that the process can first end late calls of `async` environments itself."""
_TOGETHER_S = 0.5
"""Extra seconds before late calls are ended: all hanging agents of a wave are late by then, and end together."""
_TICK_S = 0.1
_LOAD_S = 300.0
"""Seconds to import the environment: long on a shared file system with a cold cache."""
_MAX_PRINTED = 1 << 20


class EnvironmentFailedError(HpcGrpoError):
    """An environment raised, answered with an invalid value, or did not answer. Its episode is masked."""


class EnvironmentLostError(HpcGrpoError):
    """The process of a session ended: the session's episode restarts. `is_suspect`: the session's call was running."""

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
        self._processes: list[_Process] = []

    async def reset(self, row: Mapping[str, Any], seed: int) -> tuple[Session, Answer | None]:
        """Begin a session in the process with the fewest sessions. Return it with the environment's first answer.

        The answer of an agent is None: `reset` is not called. Raises the errors of `Session.step`, and ConfigError if
        the environment cannot be created.
        """
        self._processes = [own for own in self._processes if own.end is None]
        process = min(self._processes, key=lambda own: own.num_sessions, default=None)
        if process is None or (process.num_sessions and len(self._processes) < self._environment.num_workers):
            process = _Process(self._environment)
            self._processes.append(process)
        session = Session(process)
        try:
            await asyncio.shield(process.ready)
            return session, None if process.plays else await session.call("reset", row, seed)
        except BaseException:  # raised again
            session.end()
            raise

    def close(self) -> None:
        for process in self._processes:
            process.kill("was ended with its engine")


class Session:
    """One episode's environment."""

    def __init__(self, process: _Process) -> None:
        self._process, self._number = process, next(process.numbers)
        process.num_sessions += 1

    async def step(self, message: str) -> Answer:
        """Return the environment's answer to a message of the model.

        Raises EnvironmentFailedError, or EnvironmentLostError if the session's process ended.
        """
        return await self.call("step", message)

    async def call(self, method: str, *args: Any, left_s: Callable[[], float] | None = None) -> Answer:
        """Call a method. `left_s` returns the seconds that an agent has left. Raises the errors of `step`."""
        return await self._process.call(self._number, method, args, left_s)

    def end(self) -> None:
        """End the session. Its environment is then free for another session, unless this session failed."""
        self._process.num_sessions -= 1
        self._process.write(self._number, "end")


@dataclass(frozen=True)
class _Call:
    method: str
    left_s: Callable[[], float] | None
    answer: asyncio.Future[Answer]


class _Process:
    """A process that runs `host.main`, and its unanswered calls by call number."""

    def __init__(self, environment: EnvironmentConfig) -> None:
        self.num_sessions, self.numbers = 0, itertools.count()
        self.plays = self._is_async = False
        """Whether it runs agents, and `async` functions; known when it is `ready`."""
        self.end: str | None = None
        """How the process ended; None while it runs."""
        self._environment = environment
        self._calls: dict[int, _Call] = {}
        self._blocker, self._blocked_at, self._freed_at = -1, "", -math.inf
        """The call that blocks the event loop, its position in the code, and when it stopped; `inf` while it blocks."""
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

    async def call(self, session: int, method: str, args: Any, left_s: Callable[[], float] | None) -> Answer:
        """Return the answer to a call. Without `left_s`, any answer of the process restarts the call's time."""
        if self.end is not None:
            raise EnvironmentLostError(f"its process {self.end}")
        if not self._calls:
            self._last_sign = self._clock()
        call = _Call(method, left_s, asyncio.get_running_loop().create_future())
        self._calls[self.write(session, method, args)] = call
        return await asyncio.shield(call.answer)

    def write(self, session: int, method: str, args: Any = ()) -> int:
        """Send a call. Return its number."""
        number = next(self.numbers)
        if self.end is None and self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the other side has closed the connection; `_read` will notice
                self._writer.write(json.dumps([number, session, method, args]).encode() + b"\n")
        return number

    def kill(self, how: str, guilty: Collection[int] = ()) -> None:
        """Kill the process. The `guilty` calls fail; without any, the running call is suspect. Others are lost."""
        if self.end is not None:
            return
        self.end = how
        kill_group(self._process.pid)
        running = [*self._calls] if self._is_async or self.plays else [*self._calls][:1]
        for number, call in self._calls.items():
            if number in guilty:
                call.answer.set_exception(EnvironmentFailedError(f"{call.method} {how}"))
            else:
                is_suspect = not guilty and number in running
                call.answer.set_exception(EnvironmentLostError(f"its process {how}", is_suspect=is_suspect))
        self._calls.clear()
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.transport.abort()  # closing only the socket would leave its number in the loop

    async def _end_late_calls(self) -> None:
        """Kill the process if a call is late. Without a known blocker, the probable cause is the oldest call, because
        one thread serves calls in order. In an `async` environment, the newest call is the probable cause.
        """
        while self.end is None:
            await asyncio.sleep(_TICK_S)
            left_s = {number: self._left_s(number, call) for number, call in self._calls.items()}
            if min(left_s.values(), default=0.0) > -_TOGETHER_S:
                continue
            if hold_on(self._process.pid) == "stopped":
                self.kill("was stopped (SIGSTOP)")
                return
            if self._blocked_at:
                guilty = [self._blocker]
            elif self.plays:
                late = [number for number, left in left_s.items() if left <= 0.0]
                guilty = late[:1] if self._is_async else late  # one `async` agent may have held up the others
            else:
                guilty = [*left_s][-1:] if self._is_async else [*left_s][:1]
            did = "neither ended nor asked the model" if self.plays else "did not end"
            does = "blocks the event loop" if self._is_async else "is"
            where = f"; it {does} at {self._blocked_at}" if self._blocked_at else ""
            self.kill(f"{did} within {self._environment.timeout_s:g} s{where}", guilty)

    def _left_s(self, number: int, call: _Call) -> float:
        """Return the seconds that a call has left. An agent has its full time if another agent blocked it."""
        if call.left_s is None:
            return self._last_sign + self._environment.timeout_s + _GRACE_S - self._clock()
        freed_at = -math.inf if number == self._blocker else self._freed_at
        return max(call.left_s(), freed_at + self._environment.timeout_s - self._clock())

    async def _start(self) -> None:
        """Connect, and wait until the environment is imported.

        Raises ConfigError (cannot be created), EnvironmentLostError (process ended), EnvironmentLateError (too slow).
        """
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        self._writer.write(self._environment.model_dump_json().encode() + b"\n")
        name = self._environment.name
        try:
            line = await asyncio.wait_for(reader.readline(), _LOAD_S)
        except ConnectionError:  # it ended before it read the settings
            line = b""
        except TimeoutError:
            self.kill(f"did not import {name} within {_LOAD_S:g} s")
            raise EnvironmentLateError(
                f"Environment {name!r} was not imported within {_LOAD_S:g} s. Import it by hand on a compute node, and "
                f"move slow work from its module and constructor to its first call."
            ) from None
        if not line:
            await self._read(reader)
            raise EnvironmentLostError(f"its process {self.end}")
        ready = json.loads(line)
        if (refusal := ready.get("refused")) is not None:
            self.kill("was refused")
            raise ConfigError(f"Environment {name!r} cannot be made: {refusal}")
        self.plays, self._is_async = ready["plays"], ready["is_async"]
        self._tasks = asyncio.create_task(self._read(reader)), asyncio.create_task(self._end_late_calls())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Read answers until the process ends."""
        guilty = [-1]  # no call: a write to a process that has ended discards answers, and any call may have one
        with contextlib.suppress(ConnectionError, ValueError):  # ValueError: a line beyond the limit
            while line := await reader.readline():
                self._last_sign, said = self._clock(), json.loads(line)
                number = said.pop("call")
                if (blocked_at := said.get("blocks")) is not None:
                    self._blocker, self._blocked_at = number, blocked_at
                    # A call that has ended may have left a task, for which other agents do not wait.
                    self._freed_at = math.inf if blocked_at and number in self._calls else self._clock()
                    continue
                call = self._calls.pop(number)
                if (failure := said.get("failure")) is not None:
                    call.answer.set_exception(EnvironmentFailedError(f"{call.method} {failure}"))
                else:
                    call.answer.set_result(Answer(**said))
            guilty = []
        if self.end is None:
            kill_group(self._process.pid)  # it may have closed only the socket
            code = await asyncio.to_thread(self._process.wait)
            self.kill(f"ended (exit code {code})" if code >= 0 else f"ended (killed by {signal_name(-code)})", guilty)

    def _show_output(self) -> None:
        """Pass on the process's output, up to a limit: no flood fills a disk or blocks the process."""
        remaining = _MAX_PRINTED
        while data := self._process.stdout.read1(65536):
            if remaining > 0:
                is_end = len(data) >= remaining
                note = "\nThe environment prints too much: further output is dropped.\n" if is_end else ""
                sys.stderr.write(data[:remaining].decode(errors="replace") + note)
                sys.stderr.flush()
            remaining -= len(data)
        self._process.wait()


def first_answer(
    key: str, environment: EnvironmentConfig, row: Mapping[str, Any], *, is_resume: bool = False
) -> Answer | None:
    """Begin and end one session in a process. Return the first answer; None for an agent, which is not called.

    Raises ConfigError if the environment cannot begin. On a resume it has begun before: a process that ends, or imports
    too slowly, is then a LaunchError. `key` is the source's key in the config.
    """

    async def begin() -> Answer | None:
        with contextlib.closing(EnvironmentWorkers(environment)) as workers:
            return (await workers.reset(row, 0))[1]

    try:
        return asyncio.run(begin())
    except (EnvironmentFailedError, EnvironmentLostError, EnvironmentLateError) as error:
        may_pass = is_resume and not isinstance(error, EnvironmentFailedError)
        raise (LaunchError if may_pass else ConfigError)(
            f"Environment {environment.name!r} cannot begin with the first row of {key}: {str(error).rstrip('.')}. Fix "
            f"the environment, environment.args, or the row."
        ) from error
