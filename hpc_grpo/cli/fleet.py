"""The command `hpc-grpo fleet`: make one, run its loops, watch it; `fleet vm` adds VMs and takes them out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli import fleet_jobs
from hpc_grpo.cli.options import echo
from hpc_grpo.errors import ConfigError

_ONCE = click.option("--once", is_flag=True, help="One round, and end.")
_LOOPS = ("poll", "dispatch", "requeue")
_VM = click.argument("name", metavar="VM")


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
    """Make the fleet's folder with its fleet.yaml, and the tables that are missing."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.settings import SETTINGS, fleet_folder, template

    path = fleet_folder(folder)
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    settings = path / SETTINGS
    if not settings.exists():
        settings.write_text(template())
    open_folder(path)[1].create_tables()
    echo(f"The fleet is in {path}; its settings in {settings}.")
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
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.jobs import find_job

    _, database = open_folder(folder)
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
    import contextlib

    from rich.console import Console

    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.tables import watch as draw

    with contextlib.suppress(KeyboardInterrupt):
        draw(open_folder(folder)[1], Console())


def _run(folder: Path | None, names: Sequence[str], once: bool) -> None:
    """Run loops until a signal, or a round of each."""
    from hpc_grpo.fleet.controller import Controller
    from hpc_grpo.fleet.dispatch import Dispatcher
    from hpc_grpo.fleet.poll import Poller, Requeuer
    from hpc_grpo.fleet.settings import open_fleet

    opened = open_fleet(folder)

    async def run() -> None:
        controller = Controller(opened)
        kinds: dict[str, type[Poller | Dispatcher | Requeuer]]
        kinds = {"poll": Poller, "dispatch": Dispatcher, "requeue": Requeuer}
        loops = [kinds[name](controller) for name in names]
        if once:
            for loop in loops:
                await loop.round()
            await controller.close()
        else:
            echo(f"Running {', '.join(names)} for the fleet in {opened.folder}. Ctrl+C ends it; jobs run on.")
            await controller.run([loop.run for loop in loops], listens="dispatch" in names)

    asyncio.run(run())


@fleet.group()
def vm() -> None:
    """Add VMs, list them, take them out."""


@vm.command("add")
@click.argument("address")
@click.option("--name", default="", help="Default: the address.")
@click.option("--user", default="", help="Default: yours.")
@click.option("--key", "ssh_key_path", default="", help="The private key's file; default: the agent, ~/.ssh.")
@click.option("--port", default=22, show_default=True)
@click.option("--python", default="python3", show_default=True, help="On the VM: one that has hpc-grpo.")
@click.option("--work-dir", default="hpc-grpo-fleet", show_default=True, help="On the VM, below its home.")
@click.option("--nvidia-smi", default="nvidia-smi", show_default=True, help="On the VM.")
@click.option("--host-key", default="", help="Its public key, such as 'ssh-ed25519 AAAA…'; without it, it is asked.")
@click.option("--fingerprint", default="", help="Accept the key that it gives if it has this SHA256:… fingerprint.")
@click.option("--local", "is_local", is_flag=True, help="It is this machine: no ssh. ADDRESS is a name.")
@click.pass_obj
def add(folder: Path | None, /, address: str, host_key: str, fingerprint: str, is_local: bool, **values: Any) -> None:
    """Add a VM. Its host key is shown, and pinned once you agree: no other machine can stand in for it."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.vms import add_vm

    _, database = open_folder(folder)
    if not is_local:
        host_key = _trusted_key(address, values["port"], host_key, fingerprint)
    transport = "local" if is_local else "ssh"
    add_vm(database, {**values, "ip_address": address, "host_key": host_key, "transport": transport})
    echo(f"Added {values['name'] or address}. The poller looks at it soon: hpc-grpo fleet vm list")


def _trusted_key(address: str, port: int, host_key: str, fingerprint: str) -> str:
    """Return the host key to pin: that of the command line, or the VM's, if the user accepts it."""
    from hpc_grpo.fleet.ssh import fetch_host_key, pinned

    if host_key:
        pinned([host_key], port)
        return host_key
    found, seen = asyncio.run(fetch_host_key(address, port))
    if fingerprint and fingerprint != seen:
        raise ConfigError(f"--fingerprint = {fingerprint!r} must be that of {address}'s host key, which has {seen}.")
    if not fingerprint:
        click.confirm(f"The host key of {address} has the fingerprint {seen}. Trust it?", abort=True)
    return found


@vm.command("list")
@click.pass_obj
def list_command(folder: Path | None) -> None:
    """List the VMs: free GPUs, those that jobs have, those that somebody else uses."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.tables import vm_table
    from hpc_grpo.fleet.vms import list_vms

    rows = list_vms(open_folder(folder)[1])
    echo(vm_table(rows) if rows else "No VMs: hpc-grpo fleet vm add")


@vm.command()
@_VM
@click.option("--undo", is_flag=True, help="Let jobs on it again.")
@click.pass_obj
def drain(folder: Path | None, name: str, undo: bool) -> None:
    """Keep new jobs off a VM; those that run there go on."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.vms import drain_vm

    drain_vm(open_folder(folder)[1], name, is_drained=not undo)


@vm.command()
@_VM
@click.pass_obj
def remove(folder: Path | None, name: str) -> None:
    """Take out a VM that has no jobs."""
    from hpc_grpo.fleet.db import open_folder
    from hpc_grpo.fleet.vms import remove_vm

    remove_vm(open_folder(folder)[1], name)


for _command in fleet_jobs.COMMANDS:
    fleet.add_command(_command)

COMMANDS = (fleet,)
