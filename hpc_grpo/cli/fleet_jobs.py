"""The commands `hpc-grpo fleet submit|jobs|job|logs|cancel`: jobs of a fleet."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.options import OVERRIDES, echo
from hpc_grpo.errors import ConfigError

_JOB = click.argument("job_id", metavar="JOB")


@click.command()
@click.argument("config_name", metavar="[CONFIG]", required=False, default="")
@OVERRIDES
@click.option("--id", "job_id", default="", help="Default: one that is made up.")
@click.option("--gpus", "num_gpus", default=1, show_default=True, type=click.IntRange(1), help="Of one VM.")
@click.option("--gpu-memory-mib", default=0, type=click.IntRange(0), help="Share each GPU, of which it takes so much.")
@click.option("--priority", default=0, show_default=True, help="Higher ones first.")
@click.option("--retries", "max_retries", type=click.IntRange(0), help="Default: max_retries of fleet.yaml.")
@click.option("--model", default="", help="Instead of CONFIG, with the options below: a job of train_grpo.py.")
@click.option("--dataset", default="")
@click.option("--reward_function", "--reward-function", default="")
@click.option("--max_steps", "--max-steps", default=0, type=click.IntRange(0))
@click.option("--output_dir", "--output-dir", default="")
@click.option("--preprocessing", default="")
@click.option("--use_unsloth", "--use-unsloth", is_flag=True)
@click.pass_obj
def submit(folder: Path | None, /, config_name: str, overrides: tuple[str, ...], **values: Any) -> None:
    """Submit a job and print its id: a CONFIG of hpc-grpo train, whose text goes along, or a model with --model.

    Paths in it are the VMs'. Its run lies below the VM's work directory unless run.root says where.
    """
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.doorbell import announce
    from hpc_grpo.fleet.jobs import NewJob, submit_job
    from hpc_grpo.fleet.spec import config_text

    opened, database = open_folder(folder)
    if "=" in config_name and values["model"]:
        config_name, overrides = "", (config_name, *overrides)
    if bool(config_name) == bool(values["model"]):
        raise click.UsageError("Give a CONFIG, or --model with --dataset and --reward_function: one of the two.")
    path = Path(config_name).expanduser()
    config = config_text(path) if config_name and path.is_file() else ""
    if (path.suffix in (".yaml", ".yml")) != bool(config):
        raise ConfigError(
            f"CONFIG = {config_name!r} must be a .yaml file that is there, or the name of a shipped config."
        )
    job = NewJob(config_name=config_name, config=config, overrides=overrides, **values)
    job_id = submit_job(database, job, opened.settings)
    if opened.nats_url and not asyncio.run(announce(opened.nats_url, [job_id])):
        echo(f"NATS does not answer: the job is found within {opened.settings.sweep_s:.0f} s.", err=True)
    echo(job_id)


@click.command()
@click.option("--state", "states", multiple=True, help="Those in this state alone; may be repeated.")
@click.pass_obj
def jobs(folder: Path | None, states: tuple[str, ...]) -> None:
    """List the jobs, the newest first."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.jobs import count_jobs, list_jobs
    from hpc_grpo.fleet.states import JobState
    from hpc_grpo.fleet.tables import counts_line, job_table

    if wrong := [state for state in states if state not in set(JobState)]:
        raise ConfigError(f"--state = {wrong[0]!r} must be one of {', '.join(JobState)}.")
    _, database = open_folder(folder)
    rows = list_jobs(database, states)
    echo(job_table(rows, time.time()) if rows else "No jobs: hpc-grpo fleet submit")
    if rows:
        echo(counts_line(count_jobs(database)))


@click.command()
@_JOB
@click.pass_obj
def job(folder: Path | None, job_id: str) -> None:
    """Say where a job stands, and what became of each attempt at it."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.jobs import find_job, job_attempts
    from hpc_grpo.fleet.tables import attempt_table, job_table

    _, database = open_folder(folder)
    row = find_job(database, job_id)
    echo(job_table([row], time.time()))
    if row["failure_reason"]:
        echo(f"\n{row['failure_reason']}")
    if found := job_attempts(database, job_id):
        echo(f"\n{attempt_table(found)}")


@click.command()
@_JOB
@click.option("-f", "--follow", "follows", is_flag=True, help="Go on as it grows, until the job is over.")
@click.option("--attempt", type=click.IntRange(1), help="Default: the newest.")
@click.option("--lines", type=click.IntRange(0), default=50, show_default=True)
@click.pass_obj
def logs(folder: Path | None, job_id: str, follows: bool, attempt: int | None, lines: int) -> None:
    """Print the end of a job's log, as it was fetched from its VM: logs/JOB.log in the fleet's folder."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.jobs import find_job
    from hpc_grpo.fleet.logs import JobLogs, read_from, tail

    opened, database = open_folder(folder)
    row = find_job(database, job_id)
    path = JobLogs(opened.logs).path(job_id, attempt)
    if not path.exists() and not follows:
        echo(f"There is no log of it here (yet); it is {row['status']}.", err=True)
        return
    offset, text = tail(path, lines)
    shown = path.resolve()
    echo(text, nl=False)
    while follows and (row["status"] in ("queued", "running") or row["retry_at"] is not None):
        time.sleep(1.0)
        row = find_job(database, job_id)
        if path.resolve() != shown:  # a newer attempt's, from its beginning
            shown, offset = path.resolve(), 0
        more = read_from(shown, offset)
        offset += len(more)
        echo(more.decode(errors="replace"), nl=False)


@click.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@click.pass_obj
def cancel(folder: Path | None, job_ids: tuple[str, ...]) -> None:
    """Cancel jobs; one that runs ends with a checkpoint, at its VM's next visit."""
    from hpc_grpo.fleet.claims import cancel as cancel_job
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.jobs import find_job

    _, database = open_folder(folder)
    for job_id in job_ids:
        find_job(database, job_id)
        state = cancel_job(database, job_id)
        echo(f"{job_id}: {'its VM ends it at the next visit' if state == 'running' else state}")


COMMANDS = (submit, jobs, job, logs, cancel)
