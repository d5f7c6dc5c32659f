"""The command `hpc-grpo place fleet`: create a fleet, run its loops, watch it, submit jobs, and add VMs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.options import JSON, OVERRIDES, PlainGroup, echo, echo_json
from hpc_grpo.errors import ConfigError
from hpc_grpo.report.logs import GrowingFile

try:
    from rich.console import Console

    from hpc_grpo.fleet.claims import cancel as cancel_job
    from hpc_grpo.fleet.claims import queue_again
    from hpc_grpo.fleet.controller import Controller, JobLogs
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.dispatch import Dispatcher
    from hpc_grpo.fleet.doorbell import announce
    from hpc_grpo.fleet.jobs import (
        add_vm,
        count_jobs,
        drain_vm,
        find_job,
        job_attempts,
        list_jobs,
        list_vms,
        remove_vm,
        submit_job,
    )
    from hpc_grpo.fleet.machine import fetch_host_key, pinned
    from hpc_grpo.fleet.poll import Poller, Requeuer
    from hpc_grpo.fleet.settings import SETTINGS, fleet_folder, open_fleet, template
    from hpc_grpo.fleet.spec import config_text
    from hpc_grpo.fleet.states import JobState
    from hpc_grpo.fleet.tables import attempt_table, counts_line, job_table, vm_table
    from hpc_grpo.fleet.tables import watch as draw
except ModuleNotFoundError as error:
    raise ConfigError(
        "hpc-grpo place fleet needs further packages: pip install -e '.[fleet]' in hpc-grpo's folder."
    ) from error

_ONCE = click.option("--once", is_flag=True, help="Do one round only.")
_LOOPS: dict[str, type[Poller | Dispatcher | Requeuer]] = {"poll": Poller, "dispatch": Dispatcher, "requeue": Requeuer}
_VM = click.argument("name", metavar="VM")
_JOB = click.argument("job_id", metavar="JOB")


@click.group(cls=PlainGroup)
@click.option(
    "--fleet",
    "folder",
    type=click.Path(path_type=Path),
    help="The fleet's folder. Default: $HPC_GRPO_FLEET or ./fleet.",
)
@click.pass_context
def fleet(ctx: click.Context, folder: Path | None) -> None:
    """Train on a fleet of VMs: jobs wait in a database until GPUs are free.

    Begin with `init`, `vm add` and `submit`. Run `up` on a machine that can reach the VMs.
    """
    ctx.obj = folder


@fleet.command()
@click.pass_obj
def init(folder: Path | None) -> None:
    """Create the fleet's folder with its fleet.yaml, and missing tables."""
    path = fleet_folder(folder)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    settings = path / SETTINGS
    if not settings.exists():
        settings.write_text(template())
    open_folder(path)[1].create_tables()
    echo(f"The fleet is in {path}; its settings in {settings}.")
    echo("Next: hpc-grpo place fleet vm add ADDRESS --user NAME --key PATH, and hpc-grpo place fleet up.")


@fleet.command()
@_ONCE
@click.pass_obj
def poll(folder: Path | None, once: bool) -> None:
    """Visit the VMs: read GPUs, jobs and logs, and end cancelled jobs."""
    _run(folder, ["poll"], once)


@fleet.command()
@_ONCE
@click.pass_obj
def dispatch(folder: Path | None, once: bool) -> None:
    """Give free GPUs to waiting jobs, and start the jobs."""
    _run(folder, ["dispatch"], once)


@fleet.command()
@click.argument("job_ids", metavar="[JOB]...", nargs=-1)
@_ONCE
@click.pass_obj
def requeue(folder: Path | None, job_ids: tuple[str, ...], once: bool) -> None:
    """Queue ended jobs again. Without JOB: run the loop that requeues jobs of lost VMs and due retries."""
    if not job_ids:
        _run(folder, ["requeue"], once)
        return
    _, database = open_folder(folder)
    for job_id in job_ids:
        find_job(database, job_id)
        state = queue_again(database, job_id)
        echo(f"{job_id}: {'it is running' if state == 'running' else f'queued again; it was {state}'}")


@fleet.command()
@click.pass_obj
def up(folder: Path | None) -> None:
    """Run all loops in one process, until Ctrl+C. Running jobs continue without the loops for `lease_s`."""
    _run(folder, tuple(_LOOPS), once=False)


@fleet.command()
@click.pass_obj
def watch(folder: Path | None) -> None:
    """Show VMs and jobs in a table that updates itself, until Ctrl+C."""
    with contextlib.suppress(KeyboardInterrupt):
        draw(open_folder(folder)[1], Console())


def _run(folder: Path | None, names: Sequence[str], once: bool) -> None:
    """Run loops until a signal. With `once`, run one round of each loop."""
    opened = open_fleet(folder)

    async def run() -> None:
        controller = Controller(opened)
        loops = [_LOOPS[name](controller) for name in names]
        if once:
            for loop in loops:
                await loop.round()
            await controller.close()
        else:
            echo(f"Running {', '.join(names)} for the fleet in {opened.folder}. Ctrl+C ends the loops; jobs continue.")
            await controller.run([loop.run for loop in loops], listens="dispatch" in names)

    asyncio.run(run())


@fleet.group(cls=PlainGroup)
def vm() -> None:
    """Add, list, drain and remove VMs."""


@vm.command("add")
@click.argument("address")
@click.option("--name", default="", help="Name of the VM. Default: the address.")
@click.option("--user", default="", help="User on the VM. Default: your user name.")
@click.option("--key", "ssh_key_path", default="", help="File of the private key. Default: the ssh agent and ~/.ssh.")
@click.option("--port", default=22, show_default=True)
@click.option("--python", default="python3", show_default=True, help="Python on the VM, with hpc-grpo.")
@click.option(
    "--work-dir", default="hpc-grpo-fleet", show_default=True, help="Work directory on the VM, below its home."
)
@click.option("--nvidia-smi", default="nvidia-smi", show_default=True, help="The nvidia-smi command on the VM.")
@click.option("--host-key", default="", help="The VM's public key, such as 'ssh-ed25519 AAAA…'. Default: ask the VM.")
@click.option("--fingerprint", default="", help="Accept the VM's key if it has this SHA256:… fingerprint.")
@click.option("--local", "is_local", is_flag=True, help="The VM is this machine: no ssh. ADDRESS is only a name.")
@click.pass_obj
def add(folder: Path | None, /, address: str, host_key: str, fingerprint: str, is_local: bool, **values: Any) -> None:
    """Add a VM. Shows its host key and pins the key if you agree, so no other machine can pose as the VM."""
    _, database = open_folder(folder)
    if not is_local:
        host_key = _trusted_key(address, values["port"], host_key, fingerprint)
    transport = "local" if is_local else "ssh"
    add_vm(database, {**values, "ip_address": address, "host_key": host_key, "transport": transport})
    echo(f"Added {values['name'] or address}. The poller visits it soon: hpc-grpo place fleet vm list")


def _trusted_key(address: str, port: int, host_key: str, fingerprint: str) -> str:
    """Return the host key to pin: from the command line, or else from the VM if the user accepts it."""
    if host_key:
        pinned(host_key)
        return host_key
    found, seen = asyncio.run(fetch_host_key(address, port))
    if fingerprint and fingerprint != seen:
        raise ConfigError(f"--fingerprint = {fingerprint!r} differs from the fingerprint of {address}'s key: {seen}.")
    if not fingerprint:
        click.confirm(f"The host key of {address} has the fingerprint {seen}. Trust it?", abort=True)
    return found


@vm.command("list")
@JSON
@click.pass_obj
def list_command(folder: Path | None, as_json: bool) -> None:
    """List the VMs: free GPUs, GPUs of jobs, GPUs in use by others."""
    rows = list_vms(open_folder(folder)[1])
    if as_json:
        echo_json(rows)
        return
    echo(vm_table(rows) if rows else "No VMs: hpc-grpo place fleet vm add")


@vm.command()
@_VM
@click.option("--undo", is_flag=True, help="Allow new jobs again.")
@click.pass_obj
def drain(folder: Path | None, name: str, undo: bool) -> None:
    """Send no new jobs to a VM; running jobs continue."""
    drain_vm(open_folder(folder)[1], name, is_drained=not undo)


@vm.command()
@_VM
@click.pass_obj
def remove(folder: Path | None, name: str) -> None:
    """Remove a VM that has no jobs."""
    remove_vm(open_folder(folder)[1], name)


@fleet.command()
@click.argument("config_name", metavar="[CONFIG]", required=False, default="")
@OVERRIDES
@click.option("--id", "job_id", default="", help="Id of the job. Default: a generated id.")
@click.option(
    "--gpus", "num_gpus", default=1, show_default=True, type=click.IntRange(1), help="Number of GPUs, all on one VM."
)
@click.option(
    "--gpu-memory-mib",
    default=0,
    type=click.IntRange(0),
    help="MiB that the job needs on each GPU; other jobs may share the GPU. 0: no sharing.",
)
@click.option("--priority", default=0, show_default=True, help="Jobs with a higher priority start first.")
@click.option(
    "--retries", "max_retries", type=click.IntRange(0), help="Number of retries. Default: max_retries of fleet.yaml."
)
@click.option(
    "--model", default="", help="Model to train like train_grpo.py, with the options below, instead of CONFIG."
)
@click.option("--dataset", default="")
@click.option("--reward_function", "--reward-function", default="")
@click.option("--max_steps", "--max-steps", default=0, type=click.IntRange(0))
@click.option("--output_dir", "--output-dir", default="")
@click.option("--preprocessing", default="")
@click.option("--use_unsloth", "--use-unsloth", is_flag=True)
@click.pass_obj
def submit(folder: Path | None, /, config_name: str, overrides: tuple[str, ...], **values: Any) -> None:
    """Submit a job and print its id. The job trains a CONFIG, or a model with --model.

    Sends the text of CONFIG to the VM. Paths in CONFIG are paths on the VM. Default of run.root: below the VM's work
    directory.
    """
    opened, database = open_folder(folder)
    if "=" in config_name and values["model"]:
        config_name, overrides = "", (config_name, *overrides)
    if bool(config_name) == bool(values["model"]):
        raise click.UsageError("Give a CONFIG, or --model with --dataset and --reward_function: one of the two.")
    path = Path(os.path.expanduser(config_name))
    config = config_text(path) if config_name and path.is_file() else ""
    if (path.suffix in (".yaml", ".yml")) != bool(config):
        raise ConfigError(f"CONFIG = {config_name!r} must be an existing .yaml file, or the name of a shipped config.")
    job = {"config_name": config_name, "config": config, "overrides": overrides, **values}
    job_id = submit_job(database, job, opened.settings)
    if opened.nats_url and not asyncio.run(announce(opened.nats_url, [job_id])):
        echo(f"NATS does not answer: the dispatcher finds the job within {opened.settings.sweep_s:.0f} s.", err=True)
    echo(job_id)


@fleet.command()
@click.option("--state", "states", multiple=True, help="Only jobs in this state; may be repeated.")
@JSON
@click.pass_obj
def jobs(folder: Path | None, states: tuple[str, ...], as_json: bool) -> None:
    """List the jobs, the newest first."""
    if wrong := [state for state in states if state not in set(JobState)]:
        raise ConfigError(f"--state = {wrong[0]!r} must be one of {', '.join(JobState)}.")
    _, database = open_folder(folder)
    rows = list_jobs(database, states)
    if as_json:
        echo_json(rows)
        return
    echo(job_table(rows, time.time()) if rows else "No jobs: hpc-grpo place fleet submit")
    if rows:
        echo(counts_line(count_jobs(database)))


@fleet.command()
@_JOB
@JSON
@click.pass_obj
def job(folder: Path | None, job_id: str, as_json: bool) -> None:
    """Show the state of a job, and the end of each of its attempts."""
    _, database = open_folder(folder)
    row = find_job(database, job_id)
    if as_json:
        echo_json({**row, "attempts": job_attempts(database, job_id)})
        return
    echo(job_table([row], time.time()))
    if row["failure_reason"]:
        echo(f"\n{row['failure_reason']}")
    if found := job_attempts(database, job_id):
        echo(f"\n{attempt_table(found)}")


@fleet.command()
@_JOB
@click.option("-f", "--follow", "follows", is_flag=True, help="Follow the log until the job ends.")
@click.option("--attempt", type=click.IntRange(1), help="Attempt to show. Default: the newest.")
@click.option("--num", "lines", type=click.IntRange(0), default=50, show_default=True, help="Number of last lines.")
@click.pass_obj
def logs(folder: Path | None, job_id: str, follows: bool, attempt: int | None, lines: int) -> None:
    """Print the end of a job's log. Reads the copy in the fleet's folder, logs/JOB.log."""
    opened, database = open_folder(folder)
    row = find_job(database, job_id)
    path = JobLogs(opened.logs).path(job_id, attempt)
    if not path.exists() and not follows:
        echo(f"The fleet's folder has no log of {job_id} yet. The job is {row['status']}.", err=True)
        return
    file = GrowingFile(path.resolve(), lines)
    echo(file.read(), nl=False)
    while follows and (row["status"] in ("queued", "running") or row["retry_at"] is not None):
        time.sleep(1.0)
        row = find_job(database, job_id)
        if path.resolve() != file.path:  # the log of a newer attempt: show all of it
            file = GrowingFile(path.resolve(), None)
        while text := file.read():
            echo(text, nl=False)


@fleet.command()
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True)
@click.pass_obj
def cancel(folder: Path | None, job_ids: tuple[str, ...]) -> None:
    """Cancel jobs. A running job writes a checkpoint and ends after the next visit of its VM."""
    _, database = open_folder(folder)
    for job_id in job_ids:
        find_job(database, job_id)
        state = cancel_job(database, job_id)
        echo(f"{job_id}: {'its VM ends it at the next visit' if state == 'running' else state}")
