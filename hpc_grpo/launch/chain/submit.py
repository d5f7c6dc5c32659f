"""Queue the jobs of a run and cancel them, from outside; what any job of it runs and may ask for.

Runs on a login node: consumes a frozen run directory, produces jobs and their record in chain.json.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from hpc_grpo.config import LaunchConfig, load_resolved, with_overrides
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.place import queue_of
from hpc_grpo.launch.place.base import JobQueue, JobRequest
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import read_chain, write_chain
from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.lock import LockOwner, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import start_time
from hpc_grpo.system.readable import counted
from hpc_grpo.system.say import say

_BETWEEN_SIGNALS_S = 0.5
"""Two signals in one breath are one to their receiver."""


def attempt_command(run: RunDir, driver: str = DEFAULT_DRIVER, successor_of: str = "") -> str:
    """Return what a job has hpc-grpo do; `successor_of` is the job that queues it, "" where the user does."""
    words = ["attempt", str(run.path)]
    if successor_of:
        words += ["--successor-of", successor_of]
    if driver != DEFAULT_DRIVER:
        words += ["--driver", driver]
    return shlex.join(words)


def submit_run(run: RunDir, launch: LaunchConfig, driver: str, queue: JobQueue) -> str:
    """Queue the jobs of `requested_launches` for a run that nothing trains; return the first one's id.

    Raises LaunchError, and ConfigError where the run has used its node-hours.
    """
    first, *further = requested_launches(run, launch)
    remove_stop(run)  # before the job is there, which may start at once
    at_once = not first.slurm.jobs_can_submit
    if earlier := [link.job_id for link in read_chain(run).since_the_user()]:
        queue.cancel(earlier)  # what still waits of an earlier chain would take turns with this one
    jobs = [queue.submit(JobRequest(run, first, attempt_command(run, driver), is_held=at_once))]
    try:
        for follower in further:
            command = attempt_command(run, driver, successor_of=jobs[-1])
            jobs.append(queue.submit(JobRequest(run, follower, command, after=jobs[-1])))
    except LaunchError as error:
        queue.cancel(jobs)
        raise LaunchError(f"{error} It was follow-on job {len(jobs)}; the jobs before it were cancelled.") from error
    record = replace(read_chain(run).asking_for(launch), successor="", ended="")
    for job_id, before in zip(jobs, ["", *jobs], strict=False):
        record = record.with_link(job_id, before)
    write_chain(run, record)
    if at_once:
        queue.release(jobs[0])  # held until now: a link may write the record as well
    return jobs[0]


def requested_launches(run: RunDir, launch: LaunchConfig) -> list[LaunchConfig]:
    """Return what the first job asks for and, where jobs cannot submit others, each that may follow it.

    Raises ConfigError where the run has used its node-hours.
    """
    used = node_hours_used(read_attempts(run), time.time())
    requested = [within_node_hours(launch, used)]
    for _ in range(0 if launch.slurm.jobs_can_submit else launch.slurm.max_job_chains or 0):
        used += node_hours_asked(requested[-1])
        try:
            requested.append(within_node_hours(launch, used))
        except ConfigError:
            break  # as many as the ceiling allows
    return requested


def next_launch(run: RunDir, overrides: Sequence[str]) -> LaunchConfig:
    """Return what the run's next job asks for: what the last one had, changed by `overrides`.

    An override of one option about memory replaces the one before: a job takes one.
    """
    config = load_resolved(run.config)
    launch = read_chain(run).launch(config.launch)
    if any(word.startswith("launch.slurm.extra.mem") for word in overrides):
        extra = {name: value for name, value in launch.slurm.extra.items() if not name.startswith("mem")}
        launch = launch.model_copy(update={"slurm": launch.slurm.model_copy(update={"extra": extra})})
    return with_overrides(config.model_copy(update={"launch": launch}), overrides).launch


def remove_stop(run: RunDir) -> None:
    """Remove the STOP file of before: the user wants the run to go on."""
    if run.stop_marker.exists():
        run.stop_marker.unlink()
        say(f"Removed {run.stop_marker.name}, which had asked the run to end.", sys.stderr)


def node_hours_asked(launch: LaunchConfig) -> float:
    """Return the node-hours of a job that goes on to its time limit."""
    return launch.num_nodes * launch.slurm.time_min / 60


def node_hours_used(attempts: Sequence[AttemptRecord], now: float) -> float:
    """Count the node-hours that the jobs among a run's attempts, in order, have used until `now` (unix seconds).

    One that was killed without a word counts until the next began, or its allocation ended: never too little.
    """
    jobs = [attempt for attempt in attempts if queue_of(attempt.source) is not None]
    latest_ends = [*(following.started_at for _, following in pairwise(jobs)), now]
    node_seconds = 0.0
    for job, latest in zip(jobs, latest_ends, strict=False):
        end = job.ended_at if job.ended_at is not None else min(latest, job.ends_at or latest)
        node_seconds += len(job.nodes) * max(0.0, end - job.started_at)
    return node_seconds / 3600


def node_hours_when_over(attempts: Sequence[AttemptRecord], job_id: str, job_hours: float, now: float) -> float:
    """Count as `node_hours_used`, but a job that goes on with the `job_hours` of its time limit."""
    over = [attempt for attempt in attempts if attempt.ended_at or attempt.job_id != job_id]
    is_job_over = any(attempt.job_id == job_id for attempt in over)
    return node_hours_used(over, now) + (0.0 if is_job_over else job_hours)


def within_node_hours(launch: LaunchConfig, used: float) -> LaunchConfig:
    """Return `launch` asking for no more walltime than `used` node-hours leave of `launch.slurm.max_node_hours`.

    Raises ConfigError where that is too little for the nodes to come up.
    """
    slurm = launch.slurm
    if slurm.max_node_hours is None:
        return launch
    left_min = int((slurm.max_node_hours - used) * 60 / launch.num_nodes)
    if left_min * 60 < launch.bringup_deadline_s:
        raise ConfigError(
            f"The jobs of this run have taken {used:.1f} of launch.slurm.max_node_hours = {slurm.max_node_hours:g}: "
            f"too little is left for another job of {launch.num_nodes} node(s). Raise it to go on."
        )
    shorter = slurm.model_copy(update={"time_min": min(slurm.time_min, left_min)})
    return launch.model_copy(update={"slurm": shorter})


def cancel_run(run: RunDir, queue: JobQueue) -> Iterator[str]:
    """End the run now; yield what was done. Raises LaunchError when the queue does not answer.

    The STOP file comes first, so that nothing new starts; then its jobs, or its process here.
    """
    run.stop_marker.touch()
    jobs = [link.job_id for link in read_chain(run).since_the_user()]
    owner = read_lock_owner(run)
    if jobs:
        queue.cancel(list(reversed(jobs)))  # what waits before what runs
        # The running link may be killed before it can say so.
        record = read_chain(run)
        write_chain(run, replace(record, successor="", ended=record.ended or "Cancelled by hpc-grpo cancel."))
        yield f"Cancelled what is left of {counted(len(jobs), 'job')}: {', '.join(jobs)}."
    if owner is not None and owner.job_id not in jobs:
        yield _end_process(owner)
    elif not jobs:
        yield "Nothing of the run is waiting or running."


def _end_process(owner: LockOwner) -> str:
    """End a run that was started by hand. Its allocation is the user's own and stays."""
    if owner.host != socket.gethostname():
        return f"It was started by hand on {owner.host}: the STOP file ends it there after its step."
    if start_time(owner.pid) != owner.pid_started:
        return f"Process {owner.pid} is gone already."
    os.kill(owner.pid, signal.SIGTERM)
    time.sleep(_BETWEEN_SIGNALS_S)
    if start_time(owner.pid) == owner.pid_started:
        os.kill(owner.pid, signal.SIGTERM)  # the second one does not wait for a checkpoint
    return f"Told process {owner.pid} to end."
