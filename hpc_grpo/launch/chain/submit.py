"""Submit or cancel a run: queue its first job, or all of them, and end its remaining jobs.

Runs on a login node. Reads a frozen run directory; queues jobs and records them in chain.json.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpc_grpo.config import LaunchConfig, with_overrides
from hpc_grpo.errors import ConfigError, JobInDoubtError, LaunchError
from hpc_grpo.launch.chain import decide
from hpc_grpo.launch.place.job_queue import JobQueue, JobRequest, job_of_task
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain, write_chain
from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.files import copy_path, write_atomic
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.lock import LockOwner, read_lock_owner, refuse_if_held
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import counted
from hpc_grpo.system.say import say

_BETWEEN_SIGNALS_S = 0.5  # The receiver may see two signals in quick succession as one.


def attempt_command(run: RunDir, driver: str = DEFAULT_DRIVER, successor_of: str = "") -> str:
    """Return the hpc-grpo arguments of a job. `successor_of` is the job before it in the chain, "" for the first."""
    words = ["attempt", str(run.path)]
    if successor_of:
        words += ["--successor-of", successor_of]
    if driver != DEFAULT_DRIVER:
        words += ["--driver", driver]
    return shlex.join(words)


def submit_run(run: RunDir, launch: LaunchConfig, driver: str, queue: JobQueue, after: str = "") -> str:
    """Queue the jobs of `requested_launches` for a run that no attempt trains. Return the first job's id.

    `after` is a job that must end first, "" for none. Raises LaunchError, and ConfigError without node-hours left.
    """
    command, afters = attempt_command(run, driver), (after,) if after else ()
    return submit_runs(JobRequest(run, launch, command, after=afters), [run], driver, queue)


def submit_runs(request: JobRequest, runs: Sequence[RunDir], driver: str, queue: JobQueue) -> str:
    """Queue the first job of a run, or the array of several, and each run's follow-on jobs. Return the first id.

    Removes STOP files, cancels the jobs of an earlier chain, and records the new jobs. If a follow-on job fails,
    cancels the queued ones. Raises LaunchError; JobInDoubtError if jobs may stay in the queue.
    """
    launches = {run.path: requested_launches(run, request.launch) for run in runs}
    first = min((own[0] for own in launches.values()), key=lambda launch: launch.slurm.time_min)
    has_further = any(len(own) > 1 for own in launches.values())
    records = {}
    for run in runs:
        remove_stop(run)  # First, because the job may start at once.
        if earlier := [link.job_id for link in read_chain(run).since_the_user()]:
            queue.cancel(earlier)  # Waiting jobs of an earlier chain would take turns with this one.
        # Write this first: a job reads its successor's request from it.
        records[run] = read_chain(run).asking_for(request.launch)
        write_chain(run, records[run])
        run.slurm_logs.mkdir(exist_ok=True)
    # The job is held until the record is written, because a running job writes the record too.
    job_id = queue.submit(replace(request, launch=first, is_held=has_further))
    firsts = [job_of_task(job_id, number) for number in request.tasks] or [job_id]
    queued = [job_id]
    try:
        for run, own in zip(runs, firsts, strict=True):
            queued += _queue_followers(run, own, launches[run.path][1:], driver, queue)
    except BaseException as error:  # also at Ctrl+C: no job may stay held
        try:
            queue.cancel(queued)
        except LaunchError as kept:
            told = f"{error}\nCancelling jobs {', '.join(queued)} failed, so they may stay in the queue: {kept}"
            raise JobInDoubtError(told) from error
        for run, record in records.items():
            write_chain(run, record)
        raise
    if has_further:
        try:
            queue.release(job_id)
        except LaunchError as error:
            give_up = "\n".join(f"  hpc-grpo stop --now {run.path}" for run in runs)
            raise LaunchError(
                f"{error}\nJob {job_id} is submitted and stays held until that command succeeds. To give it up:\n"
                f"{give_up}"
            ) from error
    return job_id


def _queue_followers(
    run: RunDir, first: str, launches: Sequence[LaunchConfig], driver: str, queue: JobQueue
) -> Iterator[str]:
    """Queue follow-on jobs behind a run's first job, yield the id of each, and record all of them.

    Raises LaunchError only if jobs cannot submit jobs: otherwise the running job queues the missing jobs.
    """
    jobs = [first]
    try:
        for follower in launches:
            command = attempt_command(run, driver, successor_of=jobs[-1])
            jobs.append(queue.submit(JobRequest(run, follower, command, after=tuple(jobs[-2:]))))
            yield jobs[-1]
    except LaunchError as error:
        if launches[0].slurm.jobs_can_submit:
            say(f"Until job {first} runs and queues one, no job waits behind job {jobs[-1]}: {error}", sys.stderr)
        else:
            raise LaunchError(f"{error} It was follow-on job {len(jobs)}; those before it were cancelled.") from error
    record = replace(read_chain(run), successor="", ended="")
    for job_id, before in zip(jobs, ["", *jobs], strict=False):
        record = record.with_link(job_id, before)
    write_chain(run, record)


def refuse_if_trained(run: RunDir, queue: JobQueue) -> None:
    """Raise RunHeldError if an attempt trains the run. An owner whose job is over in the queue does not count."""
    jobs = {link.job_id for link in read_chain(run).links}

    def is_over(owner: LockOwner) -> bool:
        return owner.job_id in jobs and ((job := queue.show(owner.job_id)) is None or job.is_over)

    refuse_if_held(run, is_over=is_over)


@contextlib.contextmanager
def undone_unless_queued(run: RunDir) -> Iterator[None]:
    """Remove a new run, and restore COMPLETE and config of a complete one, if the block fails to queue a job.

    A new run stays if the queue may have taken a job (also after Ctrl+C), or if an attempt has begun in the run.
    """
    is_new = not run.path.exists()
    files = (run.complete_marker, run.config, copy_path(run.config)) if run.is_complete() else ()
    kept = {path: path.read_text(encoding="utf-8") for path in files if path.exists()}
    links = read_chain(run).links
    try:
        yield
    except BaseException as error:  # Also at Ctrl+C.
        if read_chain(run).links == links:
            is_unused = run.path.exists() and read_lock_owner(run) is None
            if is_new and is_unused and not isinstance(error, JobInDoubtError | KeyboardInterrupt):
                shutil.rmtree(run.path)
            for path, text in kept.items():
                write_atomic(path, text)
        raise


def requested_launches(run: RunDir, launch: LaunchConfig) -> list[LaunchConfig]:
    """Return the requests of the first job and its two followers, or of all jobs if jobs cannot submit.

    The first job also queues missing followers, unless its setup lines fail. Raises ConfigError if too few node-hours
    are left.
    """
    refuse_endless_chain(launch)
    used = decide.node_hours_used(read_attempts(run), time.time())
    try:
        requested = [decide.within_node_hours(launch, used)]
    except ConfigError as error:
        raise ConfigError(f"{run.name}: {error}") from None
    num_further = launch.slurm.max_job_chains or 0
    if launch.slurm.jobs_can_submit:
        num_further = sum(decide.may_queue_successor(launch, links_before) for links_before in range(decide.FOLLOWERS))
    for _ in range(num_further):
        used += decide.node_hours_asked(requested[-1])
        try:
            requested.append(decide.within_node_hours(launch, used))
        except ConfigError:
            break  # queue as many as max_node_hours allows
    return requested


def refuse_endless_chain(launch: LaunchConfig) -> None:
    """Raise ConfigError for a chain without an end whose jobs all have to be queued now."""
    if launch.slurm.max_job_chains is None and not launch.slurm.jobs_can_submit:
        raise ConfigError(
            "launch.slurm.max_job_chains = null (the default) needs jobs that can submit. With "
            "launch.slurm.jobs_can_submit = false, all follow-on jobs are queued at the start. Give their number: "
            "launch.slurm.max_job_chains=N, or submit --chain N; 0 (--one-job) for none."
        )


def next_launch(run: RunDir, overrides: Sequence[str]) -> LaunchConfig:
    """Return the request of the run's next job: that of the last job, changed by `overrides`."""
    config = read_config(run)
    launch = read_chain(run).launch(config.launch)
    # A job has one memory option, so an override replaces any other.
    if any(word.startswith("launch.slurm.extra.mem") for word in overrides):
        extra = {name: value for name, value in launch.slurm.extra.items() if not name.startswith("mem")}
        launch = launch.model_copy(update={"slurm": launch.slurm.model_copy(update={"extra": extra})})
    return with_overrides(config.model_copy(update={"launch": launch}), overrides).launch


def remove_stop(run: RunDir) -> None:
    """Remove an earlier STOP file: the user wants the run to continue."""
    if run.stop_marker.exists():
        run.stop_marker.unlink()
        say(f"Removed {run.stop_marker.name}, which had asked the run to end.", sys.stderr)


def cancel_run(run: RunDir, queue: JobQueue) -> Iterator[str]:
    """End the run now, and yield a line for each thing done. Raises LaunchError if the queue does not answer.

    Writes the STOP file first, so that nothing new starts. Then ends its jobs, or its process here.
    """
    run.stop_marker.touch()
    jobs = [link.job_id for link in read_chain(run).since_the_user()]
    owner = read_lock_owner(run)
    if jobs:
        queue.cancel(list(reversed(jobs)))  # waiting jobs before running ones
        # The running link may be killed before it can record the end.
        record = read_chain(run)
        write_chain(run, replace(record, successor="", ended=record.ended or "Cancelled by hpc-grpo stop --now."))
        yield f"Cancelled what is left of {counted(len(jobs), 'job')}: {', '.join(jobs)}."
    if owner is None or owner.job_id in jobs:
        if not jobs:
            yield "Nothing of the run is waiting or running."
    # Started by hand: the allocation belongs to the user and stays.
    elif not owner.is_on_this_host:
        yield f"It was started by hand on {owner.host}: the STOP file ends it there after its step."
    elif not owner.has_process:
        yield f"Process {owner.pid} is gone already."
    else:
        os.kill(owner.pid, signal.SIGTERM)
        time.sleep(_BETWEEN_SIGNALS_S)
        if owner.has_process:
            os.kill(owner.pid, signal.SIGTERM)  # a second signal ends it without a checkpoint
        yield f"Told process {owner.pid} to end."
