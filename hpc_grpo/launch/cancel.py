"""Ending a run from outside: the STOP file first, so that nothing new starts; then what waits; then what runs."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

from hpc_grpo.launch.chain_record import read_chain
from hpc_grpo.launch.holder import Holder, read_holder
from hpc_grpo.launch.processes import start_time
from hpc_grpo.launch.slurm_job import cancel_jobs
from hpc_grpo.run_dir import RunDir


def cancel_run(run: RunDir) -> Iterator[str]:
    """End the run's jobs; yields what was done, in words. Raises LaunchError when Slurm does not answer."""
    run.stop_marker.touch()
    chain, holder = read_chain(run), read_holder(run)
    jobs = [job for job in (chain.successor, chain.links[-1].job_id if chain.links else "") if job]
    if holder is not None and not holder.job_id.startswith("local"):
        jobs.append(holder.job_id)
    jobs = list(dict.fromkeys(jobs))
    if jobs:
        cancel_jobs(jobs)
        yield f"Cancelled {', '.join(jobs)}."
    if holder is not None and holder.job_id.startswith("local"):
        yield _end_local(holder)
    if not jobs and holder is None:
        yield "Nothing of the run is waiting or running."


def _end_local(holder: Holder) -> str:
    if holder.host != socket.gethostname():
        return f"It runs on {holder.host}; the STOP file ends it there after its step."
    if start_time(holder.pid) != holder.pid_started:
        return f"Process {holder.pid} is gone already."
    for _ in range(2):  # the second one does not wait for a checkpoint
        os.kill(holder.pid, signal.SIGTERM)
    return f"Told process {holder.pid} to end."
