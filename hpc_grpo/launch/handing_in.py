"""Handing a frozen run in: its first job, and where jobs cannot submit others all that may follow it."""

from __future__ import annotations

from dataclasses import replace

from hpc_grpo.config.launch_schema import LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch import slurm
from hpc_grpo.launch.chain_record import read_chain, write_chain
from hpc_grpo.launch.slurm_job import cancel_jobs, release_job
from hpc_grpo.run_dir import RunDir


def hand_in(run: RunDir, launch: LaunchConfig, driver: str) -> str:
    """Submit a run that nothing trains and write its jobs down; gives the first one's id. Raises LaunchError."""
    if earlier := [link.job_id for link in read_chain(run).since_the_user()]:
        cancel_jobs(earlier)  # what still waits of an earlier chain would take turns with this one
    jobs = [slurm.submit(launch, run, slurm.attempt_command(run, driver), hold=not launch.slurm.jobs_can_submit)]
    try:
        for _ in range(0 if launch.slurm.jobs_can_submit else launch.slurm.max_job_chains or 0):
            command = slurm.attempt_command(run, driver, successor_of=jobs[-1])
            jobs.append(slurm.submit(launch, run, command, after=jobs[-1]))
    except LaunchError as error:
        cancel_jobs(jobs)
        raise LaunchError(f"{error} It was follow-on job {len(jobs)}; the jobs before it were cancelled.") from error
    record = replace(read_chain(run), successor="", ended="")
    for job_id, before in zip(jobs, ["", *jobs], strict=False):
        record = record.with_link(job_id, before)
    write_chain(run, record)
    if not launch.slurm.jobs_can_submit:
        release_job(jobs[0])  # held until now: a link may write the record as well
    return jobs[0]
