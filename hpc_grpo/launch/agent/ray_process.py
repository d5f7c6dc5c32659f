"""Ray's process on one node, as its agent holds it. Runs in the agent's main thread, to which its end is tied."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_grpo.launch.agent.ray_command import STARTED_LINE
from hpc_grpo.system.processes import die_with_parent
from hpc_grpo.system.say import say


class RayProcess:
    """`ray start` in the foreground, with its output in a log that earlier tries wrote to as well."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._begin = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def is_up(self) -> bool:
        return STARTED_LINE.encode() in self._log.read_bytes()[self._begin :]

    def terminate(self, grace_s: Callable[[], float]) -> None:
        """Ask it to end, and wait for that; `grace_s` is asked at every turn, since it may shrink meanwhile."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        begun = time.monotonic()
        while self._process.poll() is None and time.monotonic() - begun < grace_s():
            time.sleep(0.05)
        if self._process.poll() is None:
            say(f"ray start did not end within {grace_s():.1f} s of SIGTERM", sys.stderr)
