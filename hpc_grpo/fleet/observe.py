"""The transactions on VMs: which are due for a visit, what a visit has seen, which were not seen for too long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from hpc_grpo.fleet.claims import end_attempt, is_foreign, mark_started
from hpc_grpo.fleet.db import Database
from hpc_grpo.fleet.machine import Vm
from hpc_grpo.fleet.messages import AttemptKey, GpuSeen, Observation, Orders
from hpc_grpo.fleet.schema import attempts, gpus, jobs, vms
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.states import Ending, JobState, VmState
from hpc_grpo.system.readable import printable

_NO_VM = "its VM has no row any more: somebody deleted it"


def take_due(db: Database, settings: FleetSettings) -> list[Vm]:
    """Return the VMs that are due for a visit, and no other controller's: their next one is set.

    Time in which no controller looked at a VM does not count towards its loss.
    """
    is_due = vms.c.poll_at <= sa.bindparam("now")
    with db.read() as connection:  # most looks find nothing, and take no lock
        if (
            connection.execute(sa.select(vms.c.vm_id).where(is_due).limit(1), {"now": db.now(connection)}).first()
            is None
        ):
            return []
    with db.write() as connection:
        now = db.now(connection)
        rows = connection.execute(sa.select(vms).where(is_due).with_for_update(skip_locked=True), {"now": now})
        due = [Vm.from_row(row) for row in rows.mappings()]
        seen = sa.case((is_watched(now, settings), vms.c.last_seen), else_=vms.c.last_seen + (now - vms.c.poll_at))
        values = {"poll_at": now + settings.poll_s, "last_seen": seen}
        chosen = sa.update(vms).where(vms.c.vm_id == sa.bindparam("its_id")).values(values)
        if due:
            connection.execute(chosen, [{"its_id": vm.vm_id} for vm in due])
    return due


def is_watched(now: float, settings: FleetSettings) -> sa.ColumnElement[bool]:
    """Tell whether a controller looks after a VM: its visit is not overdue for long."""
    return vms.c.poll_at >= now - settings.stale_s


def missed(db: Database, vm_id: int, why: str) -> None:
    """Note a visit that failed: the VM gets no jobs until one succeeds."""
    with db.write() as connection:
        is_ready = sa.and_(vms.c.vm_id == vm_id, vms.c.state == VmState.READY)
        connection.execute(sa.update(vms).where(vms.c.vm_id == vm_id).values(error=printable(why)))
        connection.execute(sa.update(vms).where(is_ready).values(state=VmState.STALE))


def lose(db: Database, settings: FleetSettings) -> list[AttemptKey]:
    """Mark the VMs that nobody has seen as stale or lost, and end what ran on the lost ones; returns those attempts.

    Whatever ran there has ended by itself: its lease is over, and the time for its checkpoint. Where no visit has
    failed, or none was tried, the controllers were away: the next visit tells what became of the jobs.
    """
    with db.write() as connection:
        now = db.now(connection)
        is_old = sa.and_(vms.c.state == VmState.READY, vms.c.last_seen < now - settings.stale_s)
        connection.execute(sa.update(vms).where(is_old).values(state=VmState.STALE))
        limit = now - settings.lost_s
        was_not_seen = sa.or_(vms.c.last_seen.is_(None), vms.c.last_seen < limit)
        is_gone = sa.and_(vms.c.error != "", was_not_seen, is_watched(now, settings))
        at_lost_vm = (
            sa.select(jobs.c.job_id, jobs.c.attempt, jobs.c.vm_id, vms.c.name, vms.c.ip_address)
            .join_from(jobs, vms, jobs.c.vm_id == vms.c.vm_id)
            .where(jobs.c.status == JobState.RUNNING, is_gone, jobs.c.changed_at < limit)
            .with_for_update(of=vms)
        )
        lost = []
        for row in connection.execute(at_lost_vm).mappings().all():
            key = AttemptKey(row["job_id"], row["attempt"])
            why = f"{row['name'] or row['ip_address']} was not seen for {settings.lost_s:.0f} s"
            if end_attempt(connection, key, Ending("lost", why=why), settings, now):
                lost.append(key)
        lost += _lose_without_vm(connection, settings, now)
        is_lost = sa.and_(vms.c.state == VmState.STALE, is_gone)
        connection.execute(sa.update(vms).where(is_lost).values(state=VmState.LOST, available_gpus=0))
    return lost


def _lose_without_vm(connection: sa.Connection, settings: FleetSettings, now: float) -> list[AttemptKey]:
    """End what ran on VMs whose rows somebody has deleted, `lost_s` after the first look that missed the row.

    Nobody visits such a VM, so its runners have ended by themselves then. The jobs' rows say why they wait until then.
    """
    is_running = jobs.c.status == JobState.RUNNING
    has_vm = sa.exists().where(vms.c.vm_id == jobs.c.vm_id)
    is_noted = jobs.c.failure_reason == _NO_VM
    is_back = sa.and_(is_running, is_noted, has_vm)
    connection.execute(sa.update(jobs).where(is_back).values(failure_reason=""))
    is_over = sa.and_(is_running, is_noted, jobs.c.changed_at < now - settings.lost_s)
    rows = connection.execute(sa.select(jobs.c.job_id, jobs.c.attempt).where(is_over)).all()
    over = [
        key
        for row in rows
        if end_attempt(connection, key := AttemptKey(*row), Ending("lost", why=_NO_VM), settings, now)
    ]
    is_new = sa.and_(is_running, ~has_vm, ~is_noted)
    connection.execute(sa.update(jobs).where(is_new).values(failure_reason=_NO_VM, changed_at=now))
    return over


def attempts_of(db: Database, vm_id: int) -> frozenset[AttemptKey]:
    """Return the attempts that a VM was given: it has no say about the logs of others."""
    with db.read() as connection:
        rows = connection.execute(sa.select(attempts.c.job_id, attempts.c.attempt).where(attempts.c.vm_id == vm_id))
        return frozenset(AttemptKey(*row) for row in rows)


@dataclass(frozen=True)
class Recorded:
    """What a visit's commit decided. `frees_gpus`: more are free than before, so waiting jobs may fit now."""

    orders: Orders
    frees_gpus: bool


def record(
    db: Database, vm_id: int, seen: Observation, has_log: frozenset[AttemptKey], settings: FleetSettings
) -> Recorded:
    """Commit what a visit has seen, and return what is to be done there.

    `has_log` are the attempts whose logs the controller has to their end.
    """
    with db.write() as connection:
        now = db.now(connection)
        is_it = vms.c.vm_id == vm_id
        # Locks the row: nobody loses it meanwhile. Where it was deleted during the visit, its jobs' leases run out.
        if connection.execute(sa.update(vms).where(is_it).values(last_seen=now)).rowcount == 0:
            return Recorded(Orders(), frees_gpus=False)
        had = connection.scalar(sa.select(vms.c.available_gpus).where(is_it)) or 0
        running = sa.select(jobs).where(jobs.c.vm_id == vm_id, jobs.c.status == JobState.RUNNING)
        current = {AttemptKey(row["job_id"], row["attempt"]): row for row in connection.execute(running).mappings()}
        orders = _settle(connection, seen, current, has_log, settings, now)
        alive = {index for one in seen.attempts if one.ended is None for index in one.gpus}
        available = None if seen.problem else _update_gpus(connection, vm_id, seen.gpus, alive, settings)
        state = VmState.STALE if seen.problem else VmState.READY
        values = {"state": state, "error": printable(seen.problem), "available_gpus": available or 0}
        connection.execute(sa.update(vms).where(is_it).values(values))
    return Recorded(orders, frees_gpus=(available or 0) > had)


def _settle(
    connection: sa.Connection,
    seen: Observation,
    current: Mapping[AttemptKey, Mapping[Any, Any]],
    has_log: frozenset[AttemptKey],
    settings: FleetSettings,
    now: float,
) -> Orders:
    """End the jobs whose attempts are over, and sort the others by what they need."""
    renew, cancel, forget = [], [], []
    others = [one.key.job_id for one in seen.attempts if one.key not in current]
    ours = set(connection.scalars(sa.select(jobs.c.job_id).where(jobs.c.job_id.in_(others)))) if others else set()
    for one in seen.attempts:
        row = current.get(one.key)
        if row is None and one.key.job_id not in ours:
            continue  # of another fleet, or of a row that was deleted: its lease ends it
        if one.ended is not None:
            if row is not None:
                end_attempt(connection, one.key, one.ended, settings, now)
            if one.key in has_log:
                forget.append(one.key)
        elif row is None or row["is_cancelled"]:
            cancel.append(one.key)  # nobody's: a newer attempt has its job
        if one.ended is None and row is not None:
            mark_started(connection, one.key, now)
            renew.append(one.key)
    there = {one.key for one in seen.attempts}
    overdue = [key for key, row in current.items() if key not in there and now - row["changed_at"] > settings.start_s]
    return Orders(renew=tuple(renew), cancel=tuple(cancel), revoke=tuple(overdue), forget=tuple(forget))


def end_revoked(db: Database, keys: tuple[AttemptKey, ...], settings: FleetSettings) -> None:
    """Queue the jobs again whose attempts the VM has never had and, from now on, refuses."""
    with db.write() as connection:
        for key in keys:
            is_it = sa.and_(jobs.c.job_id == key.job_id, jobs.c.attempt == key.attempt)
            had_begun = connection.scalar(sa.select(jobs.c.started_at).where(is_it)) is not None
            why = "its VM no longer knows of it" if had_begun else "it was claimed, and its start never reached the VM"
            ending = Ending("lost" if had_begun else "not_started", why=why)
            end_attempt(connection, key, ending, settings, db.now(connection))


def _update_gpus(
    connection: sa.Connection, vm_id: int, seen: tuple[GpuSeen, ...], alive: set[int], settings: FleetSettings
) -> int:
    """Bring the VM's GPUs up to date, writing those that changed; returns how many are free.

    A GPU of a live attempt that the database does not hold it for is busy too: its runner is being ended.
    """
    rows = {
        row["gpu_index"]: row for row in connection.execute(sa.select(gpus).where(gpus.c.vm_id == vm_id)).mappings()
    }
    free = 0
    for gpu in seen:
        row = rows.pop(gpu.index, None)
        is_claimed = row is not None and (row["job_id"] is not None or row["claimed_mib"] > 0)
        is_busy = int(not is_claimed and (is_foreign(gpu, settings) or gpu.index in alive))
        free += not is_claimed and not is_busy
        values = {"uuid": gpu.uuid, "memory_mib": gpu.memory_mib, "used_mib": gpu.used_mib, "is_busy": is_busy}
        if row is None:
            connection.execute(sa.insert(gpus).values(vm_id=vm_id, gpu_index=gpu.index, **values))
        elif any(row[name] != value for name, value in values.items()):
            is_it = sa.and_(gpus.c.vm_id == vm_id, gpus.c.gpu_index == gpu.index)
            connection.execute(sa.update(gpus).where(is_it).values(values))
    for index, row in rows.items():  # fell off the bus
        if row["job_id"] is None and not row["claimed_mib"]:
            connection.execute(sa.delete(gpus).where(gpus.c.vm_id == vm_id, gpus.c.gpu_index == index))
    return free
