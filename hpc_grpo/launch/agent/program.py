"""Programs of a run: `Program` and `RayProcess` on this node, optionally in a container; `NodeProcess` on any node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from hpc_grpo.launch.agent.protocol import NodeSpec
from hpc_grpo.launch.agent.ray_command import STARTED_LINE
from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.place.container import Container, exit_code, labels_of
from hpc_grpo.system.process_tree import descendants, end_processes, session_members, signal_all
from hpc_grpo.system.processes import die_with_parent, start_time
from hpc_grpo.system.say import say


@dataclass(frozen=True)
class Inside:
    """The container of a program on this node, with the program's labels. `pid_file` has the program's process id."""

    container: Container
    labels: list[str]
    pid_file: Path

    def end(self) -> None:
        self.container.end(self.labels)


def inside_of(spec: NodeSpec, program: str, folder: Path) -> Inside | None:
    """Return the container of a program on this node, with its files in `folder`. None for no container."""
    return Inside(spec.container, labels_of(spec.tag, program), folder / f"{program}-pid") if spec.container else None


class Program:
    """A program that ends with the thread that started it. `process` is the program, or its container's client.

    A container shares the node's process ids, so an id is the same on both sides.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], inside: Inside | None, **options: Any
    ) -> None:
        """Start the program without input, in its own session. `options` are those of Popen."""
        self._inside = inside
        self._found: tuple[int, int] | None = None
        if inside:
            inside.pid_file.unlink(missing_ok=True)  # left by the previous try
            cwd = options.get("cwd") or Path.cwd()
            command, environ = inside.container.wrap(command, environ, cwd, inside.labels, inside.pid_file)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,  # the terminal's Ctrl+C does not reach the program
            preexec_fn=die_with_parent(),
            **options,
        )

    @property
    def pid(self) -> int:
        """The process id: the client's until the program has begun in its container."""
        if self._inside and self._found is None:
            with suppress(OSError, ValueError):
                pid = int(self._inside.pid_file.read_text())
                self._found = (pid, start_time(pid))
        return self._found[0] if self._found else self.process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while the program runs. -9 means SIGKILL, also in a container."""
        code = self.process.poll()
        return exit_code(code) if self._inside else code

    def send(self, number: int) -> None:
        """Send a signal to a living program, directly: the client cannot forward all signals."""
        if self.process.poll() is None and self._lives():
            signal_all([self.pid], number)

    def end(self, grace_s: float) -> None:
        """End the program, if it still runs, and all processes left in its session or its container."""
        end_processes(lambda: session_members(self.pid) if self._lives() else [], grace_s)
        if self._inside:
            self._inside.end()
            end_processes(lambda: session_members(self.process.pid), grace_s)
        self.process.wait()

    def _lives(self) -> bool:
        """Return whether the id from the container still belongs to the program. Always True without a container."""
        return self._found is None or start_time(self._found[0]) == self._found[1]


class RayProcess(Program):
    """`ray start` in the foreground. Its log also has the output of earlier tries.

    Raises ConfigError if this node lacks the container's engine or image.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, inside: Inside | None = None
    ) -> None:
        self._log = log
        self._raylet: tuple[int, int] | None = None
        if inside:
            inside.container.refuse_absent()
        with log.open("ab") as output:
            self._begin = output.tell()
            super().__init__(command, environment, inside, stdout=output, stderr=subprocess.STDOUT)

    def processes(self) -> list[int]:
        """Return Ray's processes: those in a container may be no descendants of this process."""
        return [self.pid, *descendants(self.pid)]

    def is_up(self) -> bool:
        return STARTED_LINE.encode() in self._log.read_bytes()[self._begin :]

    def why_ended(self) -> str:
        """Return why Ray ended on this node after it was up; "" while it runs.

        `ray start --block` continues after a raylet that ended with 0 or by SIGTERM. One example is a raylet that was
        stopped (SIGSTOP) until the other nodes declared it dead.
        """
        if (code := self.poll()) is not None:
            return f"Ray ended by itself with exit code {code}"
        for pid in descendants(self.pid, depth=1) if self._raylet is None else ():
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).name() == "raylet":
                    self._raylet = pid, start_time(pid)
        if self._raylet is None or start_time(self._raylet[0]) != self._raylet[1]:
            return "Ray's raylet ended by itself"
        return ""

    def terminate(self, grace_s: Callable[[], float]) -> None:
        """Send Ray SIGTERM and wait up to `grace_s()` seconds, which may shrink. Then end its container, if any."""
        self.process.terminate()
        begun = time.monotonic()
        while self.process.poll() is None and time.monotonic() - begun < grace_s():
            time.sleep(0.05)
        if self.process.poll() is None:
            say(f"ray start did not end within {grace_s():.1f} s of SIGTERM", sys.stderr)
        if self._inside:
            self._inside.end()


class LineReader:
    """Reads complete lines from a pipe without blocking."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._rest = b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that have arrived since the last call, without line ends."""
        while True:
            try:
                data = os.read(self._pipe.fileno(), 65536)
            except OSError:  # no data yet, or the process ended and the connection broke
                return
            if not data:
                return
            *whole, self._rest = (self._rest + data).split(b"\n")
            yield from whole


class NodeProcess(LineReader):
    """A module of hpc-grpo on any node, with JSON lines over stdin and stdout.

    The module is the node agent or the program of `doctor`. `process` is the place's connection or start command.
    """

    def __init__(self, place: Place, node: str, program: Sequence[str], stderr: IO[bytes]) -> None:
        """Start the module by the command `program`."""
        self.process = place.connection(node, program, stderr) or subprocess.Popen(
            place.start_command(node, program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=place.start_environment(os.environ),
            start_new_session=True,  # Ctrl+C is for the starting process, which ends nodes in order
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin = self.process.stdin
        super().__init__(self.process.stdout)
