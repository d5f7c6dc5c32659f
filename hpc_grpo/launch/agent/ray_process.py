"""Ray's process on one node, as its agent holds it. Runs in the agent's main thread, to which its end is tied."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hpc_grpo.launch.agent.program import Inside, Program
from hpc_grpo.launch.agent.ray_command import STARTED_LINE
from hpc_grpo.system.process_tree import descendants
from hpc_grpo.system.processes import start_time
from hpc_grpo.system.say import say

_RAYLET = "raylet"


class RayProcess:
    """`ray start` in the foreground, with its output in a log that earlier tries wrote to as well."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, inside: Inside | None = None
    ) -> None:
        self._log, self._inside = log, inside
        if inside:
            inside.container.refuse_absent()
        with log.open("ab") as output:
            self._begin = output.tell()
            self._program = Program(command, environment, inside, stdout=output, stderr=subprocess.STDOUT)
        self._process = self._program.process
        self._raylet: tuple[int, int] | None = None

    @property
    def pid(self) -> int:
        return self._program.pid

    @property
    def waited_for(self) -> int:
        """The process that is waited for: Ray's, or the client of its container."""
        return self._process.pid

    def processes(self) -> list[int]:
        """Return Ray's processes: those in a container may be no descendants of this process."""
        return [self.pid, *descendants(self.pid)]

    def poll(self) -> int | None:
        return self._program.poll()

    def is_up(self) -> bool:
        return STARTED_LINE.encode() in self._log.read_bytes()[self._begin :]

    def why_ended(self) -> str:
        """Return why Ray, once it was up, is over on this node; "" while it is not.

        `ray start --block` does not end with a raylet whose exit code is 0 or SIGTERM's, such as one that was stopped
        until the other nodes took it for dead.
        """
        if (code := self.poll()) is not None:
            return f"Ray ended by itself with exit code {code}"
        self._raylet = self._raylet or self._find_raylet()
        if self._raylet is None or start_time(self._raylet[0]) != self._raylet[1]:
            return "Ray's raylet ended by itself"
        return ""

    def _find_raylet(self) -> tuple[int, int] | None:
        """Return the raylet's process id and start time."""
        for pid in descendants(self.pid, depth=1):
            with suppress(psutil.NoSuchProcess):
                if psutil.Process(pid).name() == _RAYLET:
                    return pid, start_time(pid)
        return None

    def terminate(self, grace_s: Callable[[], float]) -> None:
        """Ask it to end, and wait for that; `grace_s` is asked at every turn, since it may shrink meanwhile.

        A container ends with it, also one whose client is gone.
        """
        if self._process.poll() is None:
            self._process.terminate()
        begun = time.monotonic()
        while self._process.poll() is None and time.monotonic() - begun < grace_s():
            time.sleep(0.05)
        if self._process.poll() is None:
            say(f"ray start did not end within {grace_s():.1f} s of SIGTERM", sys.stderr)
        if self._inside:
            self._inside.end()
