"""VMs as users see them: add one, list them, keep jobs away from one, remove it."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.fleet.db import Database, gpus, jobs, vm_name, vms
from hpc_grpo.fleet.states import JobState


def add_vm(db: Database, values: dict[str, Any]) -> int:
    """Add a row and return its id; the poller visits the VM soon.

    Raises ConfigError if the name is taken, or another ssh VM has the address.
    """
    name = values.get("name") or values["ip_address"]
    same = sa.select(vms.c.vm_id).where(
        vms.c.ip_address == values["ip_address"], vms.c.port == values["port"], vms.c.transport == "ssh"
    )
    with db.write() as connection:
        if connection.scalar(sa.select(vms.c.vm_id).where(vm_name == name)) is not None:
            raise ConfigError(f"NAME = {name!r} must be new, and a VM has this name. Give another with --name.")
        if values["transport"] == "ssh" and connection.scalar(same) is not None:
            raise ConfigError(f"ADDRESS = {values['ip_address']!r} must be new: its GPUs are in the fleet already.")
        added = connection.execute(sa.insert(vms).values({**values, "name": name}))
        (vm_id,) = added.inserted_primary_key or (0,)
        return int(vm_id)


def list_vms(db: Database) -> list[dict[str, Any]]:
    """Return the rows of VMs, each with its number of GPUs, of claimed GPUs, and of GPUs used by other processes."""
    has_jobs = sa.or_(gpus.c.job_id.is_not(None), gpus.c.claimed_mib > 0)
    claimed = sa.func.count(sa.case((has_jobs, 1))).label("claimed")
    busy = sa.func.coalesce(sa.func.sum(gpus.c.is_busy), 0).label("busy")
    query = sa.select(vms, sa.func.count(gpus.c.gpu_index).label("gpus"), claimed, busy)
    query = query.select_from(vms.outerjoin(gpus)).group_by(vms.c.vm_id).order_by(vms.c.vm_id)
    with db.read() as connection:
        now = db.now(connection)
        rows = connection.execute(query).mappings()
        return [{**row, "seen_s": None if row["last_seen"] is None else now - row["last_seen"]} for row in rows]


def drain_vm(db: Database, name: str, is_drained: bool) -> None:
    """Keep new jobs away from a VM, or allow them again. Running jobs continue. Raises ConfigError."""
    with db.write() as connection:
        change = sa.update(vms).where(vms.c.vm_id == _id_of(connection, name)).values(is_drained=int(is_drained))
        connection.execute(change)


def remove_vm(db: Database, name: str) -> None:
    """Remove a VM and its GPUs from the fleet. Raises ConfigError if jobs run on it."""
    with db.write() as connection:
        vm_id = _id_of(connection, name)
        is_on_it = sa.and_(jobs.c.vm_id == vm_id, jobs.c.status == JobState.RUNNING)
        if running := connection.scalars(sa.select(jobs.c.job_id).where(is_on_it)).all():
            raise ConfigError(
                f"A VM that is removed must have no jobs, and {name} has {', '.join(running[:5])}. "
                f"`hpc-grpo place fleet vm drain {name}` keeps new jobs off. Cancel these jobs, or wait for them."
            )
        connection.execute(sa.delete(vms).where(vms.c.vm_id == vm_id))


def _id_of(connection: sa.Connection, name: str) -> int:
    if (vm_id := connection.scalar(sa.select(vms.c.vm_id).where(vm_name == name))) is not None:
        return int(vm_id)
    names = list(connection.scalars(sa.select(vm_name)))
    raise ConfigError(
        f"VM = {name!r} must be a VM's name{nearest(name, names)} `hpc-grpo place fleet vm list` lists them."
    )
