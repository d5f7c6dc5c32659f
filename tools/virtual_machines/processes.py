"""Which process is ours. A pid alone does not say: the kernel gives it to another after the process ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import MachineError

_KILL_DEADLINE_S = 20.0


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str, poll_s: float = 0.1) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise MachineError(f"after {deadline_s:.0f} s still not true: {what}")
        time.sleep(poll_s)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may hold blanks and brackets; the fields proper follow its last bracket.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


_own: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
_left: set[int] = set()


def watch(process: subprocess.Popen[Any]) -> None:
    """Have it reaped when its machine is killed: a PID space ends only when all its dead are reaped."""
    _own.add(process)


def leave(process: subprocess.Popen[Any]) -> None:
    """Let it outlive this process on purpose; without this, Popen warns about it."""
    _own.discard(process)
    _left.add(process.pid)
    process.returncode = 0


def _reap() -> None:
    """Reap what was started here and is over. By name: others' children are theirs to wait for."""
    for process in list(_own):
        process.poll()
    for pid in list(_left):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        _left.discard(pid)


@dataclass(frozen=True)
class ProcessRecord:
    """A process, unmistakably: its pid, its start in clock ticks since boot, and which boot."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRecord:
        found = _state_and_start(pid)
        if found is None:
            raise MachineError(f"process {pid} ended before it could be recorded")
        return cls(pid, found[1], _boot_id())

    @classmethod
    def read(cls, path: Path) -> ProcessRecord | None:
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None

    def write(self, path: Path) -> None:
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self)))
        written.replace(path)

    def alive(self) -> bool:
        found = _state_and_start(self.pid)
        if found is None or self.boot_id != _boot_id():
            return False
        state, start_ticks = found
        return state not in "ZX" and start_ticks == self.start_ticks

    def kill(self) -> None:
        """Kill it, if it is still the process recorded, and wait until it is gone."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # The descriptor holds on to one process, so what is checked now is what is killed.
            if self.alive():
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            os.close(descriptor)

        self.wait(_KILL_DEADLINE_S)

    def wait(self, deadline_s: float) -> None:
        """Wait until it is gone."""

        def gone() -> bool:
            _reap()
            return not self.alive()

        wait_until(gone, deadline_s, f"process {self.pid} is gone", 0.02)
