"""One attempt at a time: the run is held by a file that its supervisor keeps beating.

`holder.json` names the attempt that owns the run directory. Another supervisor takes it over only when the holder
is provably gone: its process on this host, or its beat, watched for longer than it ever pauses. Clocks of
different nodes are not compared. Readers (`hpc-grpo status`) see from it when a run was last alive.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hpc_grpo.errors import RunHeldError
from hpc_grpo.launch.processes import start_time
from hpc_grpo.run_dir import RunDir, write_json_atomic

BEAT_S = 5.0
_SILENT_S = 4 * BEAT_S
"""A holder that has not beaten for so long is gone: a shared file system may show a beat late."""


@dataclass(frozen=True)
class Holder:
    """Who holds the run. `pid_started` is the process's start in clock ticks since boot; times are unix seconds."""

    host: str
    pid: int
    pid_started: int
    job_id: str
    attempt: int
    beat_at: float


def read_holder(run: RunDir) -> Holder | None:
    """The attempt that holds the run, or held it last if it was killed; None if the last one ended properly."""
    try:
        return Holder(**json.loads(run.holder.read_text()))
    except (FileNotFoundError, ValueError):
        return None


def refuse_if_held(run: RunDir) -> None:
    """Raise RunHeldError when an attempt has given a sign of life within the last minute. Does not wait."""
    holder = read_holder(run)
    if holder is not None and time.time() - holder.beat_at < 60.0:
        raise _held(run, holder)


class Hold:
    """Held, and kept beating by a thread, from `take` to `release`."""

    def __init__(self, run: RunDir, holder: Holder) -> None:
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
        ended_job: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Hold:
        """Become the run's holder. `ended_job` is a job that Slurm says is over: its hold is worth nothing.

        Waits up to 20 s to see whether a holder on another host still beats. Raises RunHeldError if it does.
        """
        pid = os.getpid()
        mine = Holder(socket.gethostname(), pid, start_time(pid), job_id, attempt, time.time())
        while not _create(run.holder, mine):
            other = read_holder(run)
            if other is None:
                continue  # released just now
            if other.job_id != ended_job and _is_alive(run, other, sleep):
                raise _held(run, other)
            _retire(run.holder)
        return Hold(run, mine)

    def release(self) -> None:
        self._released.set()
        self._thread.join()
        self._run.holder.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                write_json_atomic(self._run.holder, asdict(replace(self._holder, beat_at=time.time())))
            except OSError as error:  # a full disk must not end the run; the next beat may succeed
                print(f"The sign of life in {self._run.holder} was not written: {error}", file=sys.stderr)


def _held(run: RunDir, holder: Holder) -> RunHeldError:
    return RunHeldError(
        f"The run in {run.path} is being trained by attempt {holder.attempt} (job {holder.job_id}, process "
        f"{holder.pid} on {holder.host}). Wait for it, or end it with: hpc-grpo stop {run.path}"
    )


def _create(path: Path, holder: Holder) -> bool:
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


def _retire(path: Path) -> None:
    """Move a dead holder's file away; of two that try, one succeeds."""
    dead = path.with_name(f".{path.name}.dead.{socket.gethostname()}.{os.getpid()}")
    try:
        path.replace(dead)
    except FileNotFoundError:
        return
    dead.unlink()


def _is_alive(run: RunDir, other: Holder, sleep: Callable[[float], None]) -> bool:
    if other.host == socket.gethostname():
        return start_time(other.pid) == other.pid_started
    for _ in range(int(_SILENT_S)):
        sleep(1.0)
        if read_holder(run) != other:
            return True
    return False
