"""The processes of a run on nodes that join: each says in the run directory where it is, so that `stop` finds it."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from hpc_grpo.run.files import from_known, read_record, write_record
from hpc_grpo.run.lock import LockOwner, read_lock_owner
from hpc_grpo.run.owner import refuse_shared
from hpc_grpo.run.paths import RunDir

_ENDS_S = 120.0
"""Time for a teardown in order; what is left after it is killed."""
_LOOK_S = 0.2


@contextmanager
def member(run: RunDir, name: str) -> Iterator[None]:
    """Have this process be known as `name`, "worker-pod2" say, in the block."""
    run.create()
    record = run.members / f"{name}-{os.getpid()}.json"
    write_record(record, asdict(LockOwner.here(name, 0)))
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


def stop_here(run: RunDir) -> Iterator[str]:
    """End the processes of the run on this host; yield what was done.

    A head that trains ends after its step and a checkpoint, and tells its workers; one that waits, and a worker, at
    once. Raises ConfigError where another user may write the run, whose files name the processes.
    """
    refuse_shared(run.path)
    owner = read_lock_owner(run)
    is_led_here = owner is not None and owner.is_on_this_host and owner.has_process
    if is_led_here:
        run.stop_marker.touch()
        yield "The run ends after its step and a checkpoint."
    found = [(path, process) for path, process in _members(run) if process.is_on_this_host and process.has_process]
    if not found:
        yield "Nothing of the run is left on this host." if is_led_here else "Nothing of the run is on this host."
    for path, process in found:
        is_owner = is_led_here and owner is not None and owner.pid == process.pid
        if not is_owner and path.exists():  # else it ends by itself, as the head told it
            _send(process, signal.SIGTERM)
        deadline = math.inf if is_owner else time.monotonic() + _ENDS_S
        while process.has_process and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if process.has_process:
            _send(process, signal.SIGKILL)
        path.unlink(missing_ok=True)
        yield f"{process.job_id} (process {process.pid}) has ended."


def _members(run: RunDir) -> Iterator[tuple[Path, LockOwner]]:
    for path in sorted(run.members.glob("*.json")):
        process = read_record(path, from_known(LockOwner))
        if process is not None:
            yield path, process


def _send(process: LockOwner, number: int) -> None:
    if process.has_process:
        os.kill(process.pid, number)
