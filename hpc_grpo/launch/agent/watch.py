"""Watch training processes by their pulses (`run/pulse.py`) and by their state in the kernel.

The node agent watches actors and Ray's processes, the supervisor watches the driver. A watcher counts only time in
which it was awake: a suspended or busy machine makes no process late.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.run.pulse import PULSES_NAME, Beat, WakingClock, read_pulse
from hpc_grpo.run.stacks import STACKS_SIGNAL
from hpc_grpo.system.process_tree import descendants, signal_all
from hpc_grpo.system.processes import catches, hold_on, start_time

_NO_BEAT = Beat()
WAKING_S = 0.2
"""A stopped process gets SIGCONT this long before SIGKILL: enough time to write its stacks."""
STOPPED_S = 30.0
"""Nobody stops (SIGSTOP) a process of a run on purpose for this long. A debugged process is traced, not stopped."""


@dataclass(frozen=True)
class Watched:
    """A process to watch. `born` is its `start_time`, which distinguishes it from a later one with the same id."""

    name: str
    pid: int
    born: int
    beat: Beat = _NO_BEAT

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.born

    def send(self, number: int) -> None:
        """Send the process a signal, unless it is gone: another process may have its id."""
        if start_time(self.pid) == self.born:
            signal_all([self.pid], number)


@dataclass(frozen=True)
class Late:
    """A process to end, and the reason."""

    process: Watched
    why: str


@dataclass(frozen=True)
class _Seen:
    """A process at its last check. It had made no progress for `silent_s`, and had been stopped for `stopped_s`."""

    process: Watched
    silent_s: float = 0.0
    stopped_s: float = 0.0
    is_stopped: bool = False

    def why_stopped(self) -> str:
        return f"{self._named('was stopped')} for {self.stopped_s:.0f} s: somebody or something sent it SIGSTOP."

    def why_late(self) -> str:
        """Return why the process is late, in a sentence; "" if it is not late."""
        if self.stopped_s > STOPPED_S:
            return self.why_stopped()
        if self.silent_s > (limit_s := self.process.beat.limit_s):
            limit = f"{limit_s:.0f} s, a limit from its longest pause and the section deadlines"
            return f"{self._named('made no progress')} for {self.silent_s:.0f} s; it is late after {limit}."
        return ""

    def _named(self, did: str) -> str:
        work = f" in {self.process.beat.work!r}" if self.process.beat.work else ""
        return f"The {self.process.name} (process {self.process.pid}) {did}{work}"


class Watch:
    """Remembers when each process last made progress, and last ran. Call `late` every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = WakingClock(clock)
        self._looked_at = self._clock.look()
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._told: set[tuple[int, int]] = set()

    def late(self, processes: Iterable[Watched]) -> list[Late]:
        """Return the late ones of `processes`, the longest silent first. Returns each process once.

        A process held by a debugger is not late; its time starts again when it is released.
        """
        now = self._clock.look()
        since_s, self._looked_at = now - self._looked_at, now
        self._seen = {process.key: self._look_at(process, since_s) for process in processes}
        longest_first = sorted(self._seen.values(), key=lambda seen: -seen.silent_s)
        return self._once([Late(seen.process, why) for seen in longest_first if (why := seen.why_late())])

    def stopped(self) -> list[Late]:
        """Return the processes that were stopped (SIGSTOP) at the last check, each once. Some may be gone."""
        return self._once([Late(seen.process, seen.why_stopped()) for seen in self._seen.values() if seen.is_stopped])

    def _look_at(self, process: Watched, since_s: float) -> _Seen:
        before, hold = self._seen.get(process.key), hold_on(process.pid)
        is_stopped = hold == "stopped"
        if before is None:
            return _Seen(process, is_stopped=is_stopped)
        is_silent = process.beat == before.process.beat and hold != "traced"
        silent_s = before.silent_s + since_s if is_silent else 0.0
        return _Seen(process, silent_s, before.stopped_s + since_s if is_stopped else 0.0, is_stopped)

    def _once(self, found: Sequence[Late]) -> list[Late]:
        """Leave out processes that were reported before: a process that waits for a dead disk does not end."""
        new = [late for late in found if late.process.key not in self._told]
        self._told.update(late.process.key for late in new)
        return new


def kill(late: Sequence[Late]) -> None:
    """Send SIGCONT to late processes, wait 0.2 s for their stacks, and send SIGKILL."""
    for one in late:
        one.process.send(signal.SIGCONT)  # A stopped process writes its stacks only now.
    time.sleep(WAKING_S)
    for one in late:
        one.process.send(signal.SIGKILL)


def watched_on_node(shm_dir: Path, ray: int) -> Iterator[Watched]:
    """Yield the actors that have a pulse in `shm_dir`. Then yield `ray start`, Ray's processes and its other workers.

    Leaves out processes of rewards: they may be stopped on purpose, and their worker has a deadline for each call.
    """
    known = {actor.pid: actor for actor in _actors(shm_dir / PULSES_NAME)}
    yield from known.values()
    for pid in {ray, *descendants(ray, depth=2)} - known.keys():
        command = b""
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if command != b"fuse-shim\0":  # enroot's process that mounts a container's image: it stops itself
            yield Watched("process of Ray", pid, start_time(pid))


def _actors(folder: Path) -> Iterator[Watched]:
    """Yield the processes with a pulse in `folder`; remove the pulses of dead ones."""
    for path in folder.glob("*-*-*"):
        role, pid, born = path.name.rsplit("-", 2)
        if start_time(int(pid)) != int(born):
            path.unlink(missing_ok=True)
            continue
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            yield Watched(role, int(pid), int(born), read_pulse(descriptor))
        finally:
            os.close(descriptor)


def ask_for_stacks(pids: Iterable[int]) -> None:
    """Send STACKS_SIGNAL to the processes that have a handler for it. It would kill the others."""
    signal_all((pid for pid in pids if catches(pid, STACKS_SIGNAL)), STACKS_SIGNAL)
