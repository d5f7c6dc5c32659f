"""Hold a run for one attempt at a time, by a lease: a file that the attempt's supervisor renews with beats.

`holder.json` names the attempt that owns the run directory. Another supervisor takes the run only if the owner is gone.
The owner is gone if its process on this host is dead, or if it writes no beat for longer than a live owner may. The
watcher measures the pause, so clocks of different nodes are not compared. An owner that finds another name in the file
was declared dead, for example while its node was suspended, and ends itself. `hpc-grpo status` reads the last beat.

No library's lock does this. Kernel locks do not reach other nodes on every parallel file system. Lock files survive a
killed owner. Neither ends an owner that was replaced.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from hpc_grpo.errors import RunHeldError
from hpc_grpo.run.files import from_known, is_damaged, read_record, when_there_is_space, write_record
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import ProcessIdentity, pid_namespace
from hpc_grpo.system.say import not_worth_the_run, say

BEAT_S = 5.0
_SILENT_S = 4 * BEAT_S
"""An owner without a beat for this long is gone. A shared file system may show a beat late."""

_RECENT_S = 60.0

_CHECKPOINT_S = 60.0
"""Time for the last checkpoint of a replaced owner."""

_YIELD_S = 90.0
"""Longest time that a replaced owner takes to end: one heartbeat, the last checkpoint, the teardown."""


@dataclass(frozen=True)
class EndedJob:
    """The previous job, over according to its queue. `is_gone`: no process of it survives, such as on a lost node."""

    job_id: str
    is_gone: bool


@dataclass(frozen=True)
class LockOwner(ProcessIdentity):
    """The supervisor that holds the run. Times are unix seconds. Owners are equal if they are the same process.

    `work` is what its driver does since `work_at`, as the driver's pulse names it; "" before the driver says.
    """

    job_id: str
    attempt: int
    beat_at: float = field(compare=False)
    work: str = field(default="", compare=False)
    work_at: float = field(default=0.0, compare=False)

    @staticmethod
    def here(job_id: str, attempt: int) -> LockOwner:
        """Return this process as an owner."""
        process = asdict(ProcessIdentity.of_this_process())
        return LockOwner(**process, job_id=job_id, attempt=attempt, beat_at=time.time())


def read_lock_owner(run: RunDir) -> LockOwner | None:
    """Return the attempt that holds the run, or that died holding it; None if the last attempt ended properly."""
    return read_record(run.holder, from_known(LockOwner))


def refuse_if_held(
    run: RunDir,
    sleep: Callable[[float], None] | None = None,
    is_over: Callable[[LockOwner], bool] = lambda owner: False,
) -> None:
    """Raise RunHeldError if an attempt seems to train the run. `RunLock.take` makes the final decision.

    An owner on another node counts as alive for 60 s after its last beat. If `is_over(owner)`, because the owner's job
    is over, the limit is 20 s. With `sleep`, also watches this owner for up to 20 s: it may have died a moment ago.
    """
    if (owner := read_lock_owner(run)) is None:
        return
    silent_s = time.time() - owner.beat_at
    is_recent = silent_s < _SILENT_S or (silent_s < _RECENT_S and not is_over(owner))
    if (owner.has_process if owner.is_on_this_host else is_recent) and (
        sleep is None or _is_alive(run, owner, lambda _: None, sleep)
    ):
        raise _held(run, owner)


def abandoned_by(run: RunDir, before: EndedJob | None) -> LockOwner | None:
    """Return the owner left behind by the killed job `before`; None if it released the run, or may still live."""
    owner = read_lock_owner(run)
    is_left = owner is not None and before is not None and before.is_gone and owner.job_id == before.job_id
    return owner if is_left else None


class RunLock:
    """The lease on a run. A thread renews it from `take` to `release`."""

    def __init__(self, run: RunDir, owner: LockOwner) -> None:
        self._run, self._owner = run, owner
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_beating, name="hold", daemon=True)
        self._thread.start()

    @staticmethod
    def take(
        run: RunDir,
        job_id: str,
        attempt: int,
        *,
        before: EndedJob | None = None,
        asked: Callable[[LockOwner], bool | None] = lambda owner: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> RunLock:
        """Become the run's owner, and return the lock. Raises RunHeldError if another owner lives.

        Waits up to 20 s for the beat of an owner on another host, and for the repair of a damaged file. An owner of job
        `before` is replaced even if it lives: this call then waits 90 s for its end. `asked` returns whether an owner
        on another host lives, None if unknown.
        """
        mine = LockOwner.here(job_id, attempt)
        survivor: LockOwner | None = None
        while not when_there_is_space(lambda: _create(run.holder, mine), run.holder.name):
            for _ in range(int(_SILENT_S)):  # an owner that lives rewrites a damaged file
                if not is_damaged(run.holder, from_known(LockOwner)):
                    break
                sleep(1.0)
            other = read_lock_owner(run)
            is_before = other is not None and before is not None and other.job_id == before.job_id
            is_gone = is_before and before is not None and before.is_gone
            if other is not None and not is_gone and _is_alive(run, other, asked, sleep):
                if not is_before:
                    raise _held(run, other)
                survivor = other
            retire(run.holder, other)
        lock = RunLock(run, mine)
        if survivor is not None:
            say(f"Job {survivor.job_id} is over, but lives on {survivor.host}. Waiting {_YIELD_S:.0f} s for its end.")
            sleep(_YIELD_S)
        return lock

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        if read_lock_owner(self._run) == self._owner:
            self._run.holder.unlink(missing_ok=True)

    def note_work(self, work: str) -> None:
        """Note what the driver does, and since when. The next beat writes it."""
        if work != self._owner.work:
            self._owner = replace(self._owner, work=work, work_at=time.time())

    def _keep_beating(self) -> None:
        while not self._released.wait(BEAT_S):
            if not self.beat():
                if not self._released.wait(_CHECKPOINT_S):
                    os.kill(os.getpid(), signal.SIGTERM)  # A second signal ends the process without a checkpoint.
                return

    def beat(self) -> bool:
        """Write a sign of life. If another attempt owns the run, send SIGTERM to this process and return False."""
        with not_worth_the_run(f"The sign of life in {self._run.holder} was not written"):
            other = read_lock_owner(self._run)
            if other is not None and other != self._owner:
                say(f"Attempt {other.attempt} on {other.host} declared this attempt dead; ending.")
                os.kill(os.getpid(), signal.SIGTERM)
                return False
            write_record(self._run.holder, asdict(replace(self._owner, beat_at=time.time())))
        return True


def _held(run: RunDir, owner: LockOwner) -> RunHeldError:
    return RunHeldError(
        f"The run in {run.path} is being trained by attempt {owner.attempt} (job {owner.job_id}, process "
        f"{owner.pid} on {owner.host}). Wait for it, or end it with: hpc-grpo stop {run.path}"
    )


def _create(path: Path, owner: LockOwner) -> bool:
    """Create the file unless it exists. Uses a link, which every file system creates atomically."""
    beside = path.with_name(f".{path.name}.{owner.host}.{owner.pid}.{owner.pid_namespace}")
    try:
        write_record(beside, asdict(owner))
        return _linked(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _linked(source: Path, path: Path) -> bool:
    """Make `path` a link to `source` unless a file exists. Return whether `path` is that link.

    The error alone is not enough: NFS may repeat a call after a lost answer and report that the link exists.
    """
    try:
        os.link(source, path)
    except FileExistsError:
        return source.stat().st_nlink > 1
    return True


def retire(path: Path, judged: LockOwner | None) -> None:
    """Move away the file of an owner declared dead. Move it back if a new owner has just written it."""
    aside = path.with_name(f".{path.name}.dead.{socket.gethostname()}.{os.getpid()}.{pid_namespace()}")
    try:
        path.replace(aside)
    except FileNotFoundError:
        return
    found = read_record(aside, from_known(LockOwner))
    if found is not None and found != judged and not _linked(aside, path):
        say(f"Attempt {found.attempt} and another attempt took the run at the same time.")
    aside.unlink()


def _is_alive(
    run: RunDir, other: LockOwner, asked: Callable[[LockOwner], bool | None], sleep: Callable[[float], None]
) -> bool:
    if other.is_on_this_host:
        return other.has_process
    if (lives := asked(other)) is not None:
        return lives
    for _ in range(int(_SILENT_S)):
        sleep(1.0)
        found = read_lock_owner(run)
        if found is None or found != other or found.beat_at != other.beat_at:
            return True
    return False
