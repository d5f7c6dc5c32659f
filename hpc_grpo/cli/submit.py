"""The commands that submit, resume and end runs as Slurm jobs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import click

from hpc_grpo.cli.options import (
    CONFIG_OR_RUN,
    OVERRIDES,
    RUN,
    STARTS_RUN,
    echo,
    find_sweep,
    open_run,
    open_runs,
    run_unless_config,
    slurm_overrides,
    slurm_time,
)
from hpc_grpo.cli.request import Request, load_request
from hpc_grpo.cli.sweep import Sweep, load_sweep
from hpc_grpo.config.resources import expects_gpus
from hpc_grpo.errors import ConfigError, HpcGrpoError, LaunchError
from hpc_grpo.launch.chain.submit import (
    attempt_command,
    cancel_run,
    next_launch,
    refuse_endless_chain,
    refuse_if_trained,
    submit_run,
    undone_unless_queued,
)
from hpc_grpo.launch.freeze import freeze, is_over, reconfigured
from hpc_grpo.launch.place import job_queue
from hpc_grpo.launch.place.job_queue import JobQueue, JobRequest
from hpc_grpo.plan.fit import plan_of
from hpc_grpo.plan.memory import GH200
from hpc_grpo.preflight.inputs import refusals, refuse_what_fails, small_evals, to_fetch
from hpc_grpo.report.status import read_records
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.contract import DEFAULT_DRIVER
from hpc_grpo.run.lock import read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.simulate.text import plan_text
from hpc_grpo.system.readable import counted, duration
from hpc_grpo.types import GIB


@click.command()
@CONFIG_OR_RUN
@OVERRIDES
@click.option("--name", help="run.name")
@click.option("--nodes", type=click.IntRange(1), help="launch.num_nodes")
@click.option(
    "--gpus", "--gpus-per-node", "gpus_per_node", type=click.IntRange(0), metavar="N", help="launch.slurm.gpus_per_node"
)
@click.option(
    "--time", type=slurm_time, metavar="TIME",
    help="launch.slurm.time_min: 90 (minutes), 24:00:00, 1-12:30, as for sbatch.",
)  # fmt: skip
@click.option("--partition", help="launch.slurm.partition")
@click.option("--account", help="launch.slurm.account")
@click.option("--sbatch", multiple=True, metavar="KEY=VALUE", help="A further option for sbatch, such as qos=long.")
@click.option("--setup", multiple=True, metavar="LINE", help="A shell line of the job, after launch.setup_lines.")
@click.option(
    "--chain", type=click.IntRange(0), metavar="N", help="At most N follow-on jobs: launch.slurm.max_job_chains"
)
@click.option("--one-job", is_flag=True, help="No follow-on job: the run stops at the job's end, with a checkpoint.")
@click.option("--until-complete", is_flag=True, hidden=True, help="The default.")
@click.option(
    "--sweep", multiple=True, metavar="KEY=V1,V2",
    help="Submit a run for each value, as one array. Several: a run for each combination.",
)  # fmt: skip
@click.option(
    "--seeds", type=click.IntRange(1), metavar="N",
    help="Train each combination of values with N seeds, from run.seed on.",
)  # fmt: skip
@click.option(
    "--at-once", type=click.IntRange(1), metavar="N",
    help="Largest number of a sweep's tasks that run at once. Follow-on jobs do not count.",
)  # fmt: skip
@click.option("--after", default="", metavar="JOBID", help="Start after this job has ended, also if it failed.")
@click.option("--parsable", is_flag=True, help="Print the job id only.")
@click.option(
    "--dry-run", is_flag=True, help="Print the job script, the plan, and why submit would refuse (exit code 78)."
)
@click.option("--test-only", is_flag=True, help="Ask Slurm when the job would start, and do nothing.")
@STARTS_RUN
def submit(
    config_name: str,
    overrides: tuple[str, ...],
    parsable: bool,
    dry_run: bool,
    test_only: bool,
    accepts_changes: bool,
    driver: str,
    after: str,
    sweep: tuple[str, ...],
    seeds: int | None,
    at_once: int | None,
    **options: Any,
) -> None:
    """Submit a run as a Slurm job and return. The same command resumes a run that was interrupted.

    Two follow-on jobs wait behind each job and continue the run. A complete run cancels them. --one-job omits them.

    With RUN, resumes a run after `stop`, or after its chain gave up. The job asks for the same resources as the last
    job. KEY=VALUE and options may only change keys that do not change the training.
    """
    queue, words = job_queue(), [*overrides, *slurm_overrides(options)]
    is_sweep = bool(sweep) or seeds is not None
    if at_once is not None and not is_sweep:
        raise click.UsageError("--at-once needs --sweep or --seeds.")
    if (run := run_unless_config(config_name)) is not None:
        if parsable or dry_run or test_only or after or is_sweep:
            raise click.UsageError(
                "--parsable, --dry-run, --test-only, --after, --sweep and --seeds need a CONFIG instead of a RUN."
            )
        _resume(open_run(config_name), words, accepts_changes, driver, queue)
        return
    request = load_request(config_name, words).for_queue(queue)
    request.tell()
    if (num_gpus := request.config.launch.slurm.gpus_per_node) and not expects_gpus(request.config):
        echo(
            f"launch.slurm.gpus_per_node = {num_gpus}, but model.device = cpu uses no GPU. Set model.device=auto, or "
            f"launch.slurm.gpus_per_node=0.",
            err=True,
        )
    for warning in small_evals(request.config):
        echo(warning, err=True)
    run, grid = RunDir(request.config.run_path), None
    job = JobRequest(run, request.config.launch, attempt_command(run, driver))
    if is_sweep:
        grid = load_sweep(config_name, words, sweep, seeds, queue, driver)
        if not grid.job.tasks:
            echo(f"All {len(grid.runs)} runs in {grid.root} are already complete; raise train.total_* to extend them.")
            return
        job = replace(grid.job, at_once=at_once)
    job = replace(job, after=(after,) if after else ())
    refuse_endless_chain(job.launch)
    script = queue.render(job)
    if test_only:
        echo(queue.start_estimate(job), nl=False)
        return
    if dry_run:
        os.environ.update(request.exported)
        requests = [request] if grid is None else [*grid.runs.values()]
        refused: list[HpcGrpoError] = [*_held(requests, queue)]
        refused += refusals([each.config for each in requests], accepts_changes=accepts_changes)
        first = "" if grid is None else f"Runs:\n\n{grid}\n\n"
        if not refused and grid is None and is_over(run, request.config):
            first = f"submit would queue no job. {_already_complete(run)}\n\n"
        echo(script + _comments(requests, refused, first), nl=False)
        for error in refused:
            raise error
        return
    if grid is not None:
        array = replace(grid, job=job).submit(queue, driver, accepts_changes)
        echo(array if parsable else _how_to_follow_sweep(grid, array))
        return
    run, job_id = queue_run(request, queue, driver, after, accepts_changes=accepts_changes)
    if not job_id:
        echo(_already_complete(run))
    else:
        echo(job_id if parsable else _how_to_follow(run, job_id))


def queue_run(
    request: Request, queue: JobQueue, driver: str = DEFAULT_DRIVER, after: str = "", *, accepts_changes: bool = False
) -> tuple[RunDir, str]:
    """Freeze a run, queue its jobs, and return the run and its first job's id; the id of a complete run is "".

    Raises RunHeldError if an attempt trains the run, and ConfigError if the run would fail in its job.
    """
    run = RunDir(request.config.run_path)
    os.environ.update(request.exported)
    refuse_if_trained(run, queue)
    refuse_what_fails([request.config], accepts_changes=accepts_changes)
    with undone_unless_queued(run):
        freeze(request.config, sys.argv, request.overrides, accepts_changes=accepts_changes)
        job_id = "" if run.is_complete() else submit_run(run, request.config.launch, driver, queue, after)
    return run, job_id


@click.command()
@RUN
@click.option("--now", is_flag=True, help="Cancel the run and its jobs now. Steps after the last checkpoint are lost.")
def stop(run_name: str, now: bool) -> None:
    """End a run after the current step and a checkpoint. Its follow-on jobs are then cancelled.

    The name of a sweep stands for its runs.
    """
    runs = [run for run in open_runs([run_name]) if not _is_complete(run)]
    for run in runs:  # mark all runs first, so that no waiting task starts when another one ends
        run.stop_marker.touch()
    if now:
        for run in runs:
            for line in cancel_run(run, job_queue()):
                echo(f"{run.name}: {line}")
        return
    for run in runs:
        if read_lock_owner(run) is None:
            echo(f"{run.name}: No job trains it now. A waiting job will end as soon as it starts.")
        else:
            echo(f"{run.name} stops after its step and a checkpoint.")
    if runs:
        records = read_records(runs[0])
        again = records.start_command(records.newest, run_name)
        echo(f"To resume: {'the command that submitted the sweep' if find_sweep(run_name) else again}")


def _resume(run: RunDir, overrides: Sequence[str], accepts_changes: bool, driver: str, queue: JobQueue) -> None:
    """Submit a run again with the resources of its last job, changed by `overrides`."""
    if not overrides and _is_complete(run):
        return
    refuse_if_trained(run, queue)
    config = reconfigured(run, overrides)
    launch = next_launch(run, overrides)
    refuse_endless_chain(launch)
    queue.render(JobRequest(run, launch, attempt_command(run, driver)))  # refuses wrong options for sbatch
    refuse_what_fails([config.model_copy(update={"launch": launch})], accepts_changes=accepts_changes)
    with undone_unless_queued(run):
        freeze(config, sys.argv, overrides, accepts_changes=accepts_changes)
        if not _is_complete(run):  # `freeze` reopens a complete run that gets more steps
            echo(_how_to_follow(run, submit_run(run, launch, driver, queue)))


def _how_to_follow_sweep(sweep: Sweep, array: str) -> str:
    return (
        f"Submitted array {array} for {counted(len(sweep.job.tasks), 'run')} in {sweep.root}\n\n{sweep}\n\n"
        f"  where they stand:  hpc-grpo status {sweep.root}\n"
        f"  results by cell:   hpc-grpo compare {sweep.root}\n"
        f"  end all, or one:   hpc-grpo stop {sweep.root}    hpc-grpo stop {next(iter(sweep.runs)).path}"
    )


def _is_complete(run: RunDir) -> bool:
    """Return whether the run is complete. Print a line if it is."""
    if run.is_complete():
        echo(f"The run in {run.path} is complete.")
    return run.is_complete()


def _already_complete(run: RunDir) -> str:
    return f"The run in {run.path} is already complete; raise train.total_* to extend it, or give a new run.name."


def _how_to_follow(run: RunDir, job_id: str) -> str:
    waiting = ", ".join(read_chain(run).followers(job_id))
    return (
        f"Submitted job {job_id} for run {run.path}\n"
        f"  follow-on jobs:   {f'{waiting}; a complete run cancels them' if waiting else 'none'}\n"
        f"  where it stands:  hpc-grpo status {run.path}\n"
        f"  its log:          hpc-grpo logs -f {run.path}\n"
        f"  Slurm's output:   {run.slurm_log(job_id)}\n"
        f"  end it:           hpc-grpo stop {run.path}    (--now: without a checkpoint)"
    )


def _held(requests: Sequence[Request], queue: JobQueue) -> Iterator[LaunchError]:
    for request in requests:
        try:
            refuse_if_trained(RunDir(request.config.run_path), queue)
        except LaunchError as error:  # also if the queue does not answer
            yield error


def _comments(requests: Sequence[Request], refused: Sequence[HpcGrpoError], first: str) -> str:
    """Return the text below a job script, as shell comments, so sbatch still accepts the script.

    The plan is for the first request.
    """
    request = requests[0]
    try:
        plan = plan_text(plan_of(request.config, request.environ, GH200))
        assumed = f"{GH200.gpu_bytes // GIB} GiB on each GPU and {GH200.host_bytes // GIB} GiB of a node's memory"
        which = "" if len(requests) == 1 else f" of the first of {len(requests)} runs"
        plan = f"Plan{which}, assuming {assumed}; `hpc-grpo plan` takes other values.\n\n{plan}"
    except ConfigError as error:
        plan = f"No plan: {' '.join(str(error).split())}\n"
    most = request.config.launch.slurm.max_job_chains
    limit = "as many as the run needs (--one-job: none)" if most is None else f"at most {most}" if most else "none"
    time = f"Each job may run for {duration(60 * request.config.launch.slurm.time_min)}. "
    follow = f"{time}Follow-on jobs until the run is complete: {limit}.\n\n"
    text = "".join([first, *(f"submit would refuse this. {error}\n\n" for error in refused), follow, plan])
    missing = ", ".join(dict.fromkeys(str(item) for each in requests for item in to_fetch(each.config, each.environ)))
    if missing:
        text += (
            f"\nNot in the cache: {missing}. Without a network on the nodes, run hpc-grpo cluster prefetch CONFIG.\n"
        )
    return "\n" + "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
