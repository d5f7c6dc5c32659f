"""Handing a frozen run in: its first job, and where jobs cannot submit others all that may follow it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from hpc_grpo.config import LaunchConfig, load_resolved, with_overrides
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.node_hours import node_hours_asked, node_hours_used, within_node_hours
from hpc_grpo.launch.place.slurm import sbatch as slurm
from hpc_grpo.launch.place.slurm.jobs import cancel_jobs, release_job
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import asked_for, read_chain, write_chain
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import say


def submit_run(run: RunDir, launch: LaunchConfig, driver: str) -> str:
    """Submit a run that nothing trains, with `what_each_asks_for`, and write its jobs down; gives the first one's id.

    Raises LaunchError, and ConfigError where the run has used its node-hours.
    """
    first, *further = what_each_asks_for(run, launch)
    remove_stop(run)  # before the job is there, which may start at once
    at_once = not first.slurm.jobs_can_submit
    if earlier := [link.job_id for link in read_chain(run).since_the_user()]:
        cancel_jobs(earlier)  # what still waits of an earlier chain would take turns with this one
    jobs = [slurm.submit(first, run, slurm.attempt_command(run, driver), hold=at_once)]
    try:
        for follower in further:
            command = slurm.attempt_command(run, driver, successor_of=jobs[-1])
            jobs.append(slurm.submit(follower, run, command, after=jobs[-1]))
    except LaunchError as error:
        cancel_jobs(jobs)
        raise LaunchError(f"{error} It was follow-on job {len(jobs)}; the jobs before it were cancelled.") from error
    record = replace(read_chain(run), successor="", ended="", slurm=asked_for(launch))
    for job_id, before in zip(jobs, ["", *jobs], strict=False):
        record = record.with_link(job_id, before)
    write_chain(run, record)
    if at_once:
        release_job(jobs[0])  # held until now: a link may write the record as well
    return jobs[0]


def remove_stop(run: RunDir) -> None:
    """The user wants the run to go on: a STOP of before no longer counts."""
    if run.stop_marker.exists():
        run.stop_marker.unlink()
        say(f"Removed {run.stop_marker.name}, which had asked the run to end.", sys.stderr)


def what_each_asks_for(run: RunDir, launch: LaunchConfig) -> list[LaunchConfig]:
    """Of the first job, and where jobs cannot submit others of all that may follow it.

    Raises ConfigError where the run has used its node-hours.
    """
    used_node_hours = node_hours_used(read_attempts(run), time.time())
    asked = [within_node_hours(launch, used_node_hours)]
    for _ in range(0 if launch.slurm.jobs_can_submit else launch.slurm.max_job_chains or 0):
        used_node_hours += node_hours_asked(asked[-1])
        try:
            asked.append(within_node_hours(launch, used_node_hours))
        except ConfigError:
            break  # as many as the ceiling allows
    return asked


def next_launch(run: RunDir, overrides: Sequence[str]) -> LaunchConfig:
    """Return what the run's next job asks for: what the last one had, changed by `overrides`.

    sbatch takes one option about memory, so that an override of one replaces the one before.
    """
    config = load_resolved(run.config)
    launch = read_chain(run).launch(config.launch)
    if any(word.startswith("launch.slurm.extra.mem") for word in overrides):
        extra = {name: value for name, value in launch.slurm.extra.items() if not name.startswith("mem")}
        launch = launch.model_copy(update={"slurm": launch.slurm.model_copy(update={"extra": extra})})
    return with_overrides(config.model_copy(update={"launch": launch}), overrides).launch
