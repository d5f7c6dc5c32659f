"""The commands `hpc-grpo fleet vm …`: add VMs, list them, take them out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from hpc_grpo.cli.fleet_folder import open_database
from hpc_grpo.cli.options import echo
from hpc_grpo.errors import ConfigError

_VM = click.argument("name", metavar="VM")


@click.group()
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
    from hpc_grpo.fleet.vms import add_vm

    database = open_database(folder)
    if not is_local:
        host_key = _trusted_key(address, values["port"], host_key, fingerprint)
    transport = "local" if is_local else "ssh"
    add_vm(database, {**values, "ip_address": address, "host_key": host_key, "transport": transport})
    echo(f"Added {values['name'] or address}. The poller looks at it soon: hpc-grpo fleet vm list")


@vm.command("list")
@click.pass_obj
def list_command(folder: Path | None) -> None:
    """List the VMs: free GPUs, those that jobs have, those that somebody else uses."""
    from hpc_grpo.fleet.tables import vm_table
    from hpc_grpo.fleet.vms import list_vms

    rows = list_vms(open_database(folder))
    echo(vm_table(rows) if rows else "No VMs: hpc-grpo fleet vm add")


@vm.command()
@_VM
@click.option("--undo", is_flag=True, help="Let jobs on it again.")
@click.pass_obj
def drain(folder: Path | None, name: str, undo: bool) -> None:
    """Keep new jobs off a VM; those that run there go on."""
    from hpc_grpo.fleet.vms import drain_vm

    drain_vm(open_database(folder), name, is_drained=not undo)


@vm.command()
@_VM
@click.pass_obj
def remove(folder: Path | None, name: str) -> None:
    """Take out a VM that has no jobs."""
    from hpc_grpo.fleet.vms import remove_vm

    remove_vm(open_database(folder), name)


def _trusted_key(address: str, port: int, host_key: str, fingerprint: str) -> str:
    """Return the host key to pin: as given, or as the VM gives it and the user accepts it."""
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
