"""One attempt at a time: the run is held by a file that its supervisor keeps beating.

`holder.json` names the attempt that owns the run directory. Another supervisor takes it over only when the holder
is provably gone: its process on this host, or its beat, watched for longer than it ever pauses, so that clocks of
different nodes are not compared. A holder that finds another's name in the file was taken for dead (its node was
suspended, say): it ends itself. Readers (`hpc-grpo status`) see from it when a run was last alive.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_grpo.errors import RunHeldError
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import start_time
from hpc_grpo.system.say import not_worth_the_run, say

BEAT_S = 5.0
_SILENT_S = 4 * BEAT_S
"""A holder that has not beaten for so long is gone: a shared file system may show a beat late."""

_RECENT_S = 60.0

_YIELD_S = 90.0
"""A holder that finds another's name has ended after so long: a beat, its driver's last checkpoint, its teardown."""


@dataclass(frozen=True)
class EndedJob:
    """The job before, which Slurm says is over. `is_gone`: its processes too; not so of a node it lost sight of."""

    job_id: str
    is_gone: bool


@dataclass(frozen=True)
class LockOwner:
    """Who holds the run. `pid_started` is the process's start in clock ticks since boot; times are unix seconds."""

    host: str
    pid: int
    pid_started: int
    job_id: str
    attempt: int
    beat_at: float

    def is_same(self, other: LockOwner | None) -> bool:
        """The same process, whenever it beat."""
        return other is not None and replace(other, beat_at=self.beat_at) == self


def read_lock_owner(run: RunDir) -> LockOwner | None:
    """The attempt that holds the run, or held it last if it was killed; None if the last one ended properly."""
    return _read(run.holder)


def refuse_if_held(run: RunDir) -> None:
    """Raise RunHeldError when an attempt seems to train the run. Does not wait: `RunLock.take` is the one to decide."""
    holder = read_lock_owner(run)
    if holder is None:
        return
    here = holder.host == socket.gethostname()
    if start_time(holder.pid) == holder.pid_started if here else time.time() - holder.beat_at < _RECENT_S:
        raise _held(run, holder)


def left_behind(run: RunDir, before: EndedJob | None) -> LockOwner | None:
    """What the job before has left of its hold: it was killed. None if it gave it up, or may still be alive."""
    holder = read_lock_owner(run)
    is_left = holder is not None and before is not None and before.is_gone and holder.job_id == before.job_id
    return holder if is_left else None


def clear(run: RunDir, left: LockOwner) -> None:
    """Remove what is `left_behind`, where no attempt takes the run over."""
    _retire(run.holder, left)


class RunLock:
    """Held, and kept beating by a thread, from `take` to `release`."""

    def __init__(self, run: RunDir, holder: LockOwner) -> None:
        self._run = run
        self._holder = holder
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="hold", daemon=True)
        self._thread.start()

    @staticmethod
    def take(
        run: RunDir,
        job_id: str,
        attempt: int,
        *,
        before: EndedJob | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> RunLock:
        """Become the run's holder.

        Waits up to 20 s to see whether a holder on another host still beats. One of the job `before` then has 90 s to
        end itself; for any other one this raises RunHeldError.
        """
        pid = os.getpid()
        mine = LockOwner(socket.gethostname(), pid, start_time(pid), job_id, attempt, time.time())
        survivor: LockOwner | None = None
        while not _create(run.holder, mine):
            other = read_lock_owner(run)
            is_before = other is not None and before is not None and other.job_id == before.job_id
            is_gone = is_before and before is not None and before.is_gone
            if other is not None and not is_gone and _is_alive(run, other, sleep):
                if not is_before:
                    raise _held(run, other)
                survivor = other
            _retire(run.holder, other)
        hold = RunLock(run, mine)
        if survivor is not None:
            say(
                f"Slurm has ended job {survivor.job_id}, but it lives on {survivor.host}: {_YIELD_S:.0f} s for its end."
            )
            sleep(_YIELD_S)
        return hold

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        if self._holder.is_same(read_lock_owner(self._run)):
            self._run.holder.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with not_worth_the_run(f"The sign of life in {self._run.holder} was not written"):
                other = read_lock_owner(self._run)
                if other is not None and not self._holder.is_same(other):
                    say(f"Attempt {other.attempt} on {other.host} took this one for dead; ending.")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                write_json_atomic(self._run.holder, asdict(replace(self._holder, beat_at=time.time())))


def _held(run: RunDir, holder: LockOwner) -> RunHeldError:
    return RunHeldError(
        f"The run in {run.path} is being trained by attempt {holder.attempt} (job {holder.job_id}, process "
        f"{holder.pid} on {holder.host}). Wait for it, or end it with: hpc-grpo stop {run.path}"
    )


def _read(path: Path) -> LockOwner | None:
    try:
        return LockOwner(**json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None


def _create(path: Path, holder: LockOwner) -> bool:
    """Write the file unless there is one; a link is made or not, on every file system."""
    beside = path.with_name(f".{path.name}.{holder.host}.{holder.pid}")
    write_json_atomic(beside, asdict(holder))
    try:
        os.link(beside, path)
    except FileExistsError:
        return False
    finally:
        beside.unlink()
    return True


def _retire(path: Path, judged: LockOwner | None) -> None:
    """Move the file of a holder judged dead away, and back if another had taken its place meanwhile."""
    aside = path.with_name(f".{path.name}.dead.{socket.gethostname()}.{os.getpid()}")
    try:
        path.replace(aside)
    except FileNotFoundError:
        return
    found = _read(aside)
    if found is not None and not found.is_same(judged):
        try:
            os.link(aside, path)
        except FileExistsError:
            say(f"Attempts {found.attempt} and another one took the run at the same time.")
    aside.unlink()


def _is_alive(run: RunDir, other: LockOwner, sleep: Callable[[float], None]) -> bool:
    if other.host == socket.gethostname():
        return start_time(other.pid) == other.pid_started
    for _ in range(int(_SILENT_S)):
        sleep(1.0)
        if read_lock_owner(run) != other:
            return True
    return False
