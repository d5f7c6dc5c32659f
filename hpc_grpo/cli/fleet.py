"""The command `hpc-grpo fleet`: make one, run its loops, watch it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import click

from hpc_grpo.cli import fleet_jobs, fleet_vms
from hpc_grpo.cli.fleet_folder import open_database, open_folder
from hpc_grpo.cli.options import echo
from hpc_grpo.errors import ConfigError

_ONCE = click.option("--once", is_flag=True, help="One round, and end.")
_LOOPS = ("poll", "dispatch", "requeue")


@click.group()
@click.option(
    "--fleet", "folder", type=click.Path(path_type=Path), help="Its folder; default: $HPC_GRPO_FLEET or ./fleet."
)
@click.pass_context
def fleet(ctx: click.Context, folder: Path | None) -> None:
    """Train on a fleet of VMs: jobs wait in a database until GPUs are free.

    `fleet init`, `fleet vm add`, `fleet submit`, and `fleet up`, which runs the loops where the VMs are reached.
    """
    try:
        import sqlalchemy  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("hpc-grpo fleet needs further packages: pip install -e '.[fleet]' where it lies.") from error
    ctx.obj = folder


@fleet.command()
@click.pass_obj
def init(folder: Path | None) -> None:
    """Make the fleet's folder with its fleet.yaml, and the tables; bring those of an older version up to date."""
    import os

    from hpc_grpo.fleet.settings import FOLDER_VARIABLE, settings_file, template

    path = (folder or Path(os.environ.get(FOLDER_VARIABLE) or "fleet")).expanduser().absolute()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not settings_file(path).exists():
        settings_file(path).write_text(template())
    open_database(path).migrate()
    echo(f"The fleet is in {path}; its settings in {settings_file(path)}.")
    echo("Next: hpc-grpo fleet vm add ADDRESS --user NAME --key PATH, and hpc-grpo fleet up.")


@fleet.command()
@_ONCE
@click.pass_obj
def poll(folder: Path | None, once: bool) -> None:
    """Visit the VMs: their GPUs, the jobs there, the logs."""
    _run(folder, ["poll"], once)


@fleet.command()
@_ONCE
@click.pass_obj
def dispatch(folder: Path | None, once: bool) -> None:
    """Give free GPUs to waiting jobs, and start these."""
    _run(folder, ["dispatch"], once)


@fleet.command()
@click.argument("job_ids", metavar="[JOB]...", nargs=-1)
@_ONCE
@click.pass_obj
def requeue(folder: Path | None, job_ids: tuple[str, ...], once: bool) -> None:
    """Queue jobs again: those named, which are over; or run the loop that does it where a VM is lost or a retry due."""
    if not job_ids:
        _run(folder, ["requeue"], once)
        return
    from hpc_grpo.fleet.claims import queue_again
    from hpc_grpo.fleet.jobs import find_job

    database = open_database(folder)
    for job_id in job_ids:
        find_job(database, job_id)
        state = queue_again(database, job_id)
        echo(f"{job_id}: {'it is running' if state == 'running' else f'queued again; it was {state}'}")


@fleet.command()
@click.pass_obj
def up(folder: Path | None) -> None:
    """Run all loops in one process, until Ctrl+C; jobs that run go on without it for `lease_s`."""
    _run(folder, _LOOPS, once=False)


@fleet.command()
@click.pass_obj
def watch(folder: Path | None) -> None:
    """Show VMs and jobs in a table that updates itself, until Ctrl+C."""
    from rich.console import Console

    from hpc_grpo.fleet.tables import watch as draw

    try:
        draw(open_database(folder), Console())
    except KeyboardInterrupt:
        return


def _run(folder: Path | None, names: Sequence[str], once: bool) -> None:
    """Run loops until a signal, or a round of each."""
    from hpc_grpo.fleet.controller import Controller
    from hpc_grpo.fleet.dispatch import Dispatcher
    from hpc_grpo.fleet.poll import Poller
    from hpc_grpo.fleet.requeue import Requeuer

    opened, _ = open_folder(folder)
    kinds: dict[str, type[Poller | Dispatcher | Requeuer]] = {
        "poll": Poller,
        "dispatch": Dispatcher,
        "requeue": Requeuer,
    }

    async def run() -> None:
        controller = Controller(opened)
        loops = [kinds[name](controller) for name in names]
        if not once:
            echo(f"Running {', '.join(names)} for the fleet in {opened.folder}. Ctrl+C ends it; jobs run on.")
            await controller.run([loop.run for loop in loops], listens="dispatch" in names)
            return
        for loop in loops:
            await loop.round()
        await controller.close()

    asyncio.run(run())


for _command in (*fleet_jobs.COMMANDS, fleet_vms.vm):
    fleet.add_command(_command)

COMMANDS = (fleet,)
