"""Ending a run from outside: the STOP file first, so that nothing new starts; then its jobs, or its process here."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

from hpc_grpo.launch.place.slurm.jobs import cancel_jobs
from hpc_grpo.run.chain import read_chain, write_chain
from hpc_grpo.run.lock import LockOwner, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import start_time

_BETWEEN_SIGNALS_S = 0.5
"""Two signals in one breath are one to their receiver."""


def cancel_run(run: RunDir) -> Iterator[str]:
    """End the run; yields what was done, in words. Raises LaunchError when Slurm does not answer."""
    run.stop_marker.touch()
    jobs = [link.job_id for link in read_chain(run).since_the_user()]
    holder = read_lock_owner(run)
    if jobs:
        cancel_jobs(list(reversed(jobs)))  # what waits before what runs
        # The running link may be killed before it can say so.
        record = read_chain(run)
        write_chain(run, replace(record, successor="", ended=record.ended or "Cancelled by hpc-grpo cancel."))
        yield f"Cancelled what is left of {_count(len(jobs))}: {', '.join(jobs)}."
    if holder is not None and holder.job_id not in jobs:
        yield _end_process(holder)
    elif not jobs:
        yield "Nothing of the run is waiting or running."


def _end_process(holder: LockOwner) -> str:
    """A run that was started by hand: its allocation is the user's own and stays."""
    if holder.host != socket.gethostname():
        return f"It was started by hand on {holder.host}: the STOP file ends it there after its step."
    if start_time(holder.pid) != holder.pid_started:
        return f"Process {holder.pid} is gone already."
    os.kill(holder.pid, signal.SIGTERM)
    time.sleep(_BETWEEN_SIGNALS_S)
    if start_time(holder.pid) == holder.pid_started:
        os.kill(holder.pid, signal.SIGTERM)  # the second one does not wait for a checkpoint
    return f"Told process {holder.pid} to end."


def _count(number: int) -> str:
    return f"{number} job{'' if number == 1 else 's'}"
