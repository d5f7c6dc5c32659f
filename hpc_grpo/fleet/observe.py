"""Transactions on VMs: which are due for a visit, what a visit has seen, which were not seen for too long."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from hpc_grpo.fleet.claims import end_attempt, is_foreign, is_of, mark_started
from hpc_grpo.fleet.db import Database, attempts, gpus, jobs, vms
from hpc_grpo.fleet.machine import Vm
from hpc_grpo.fleet.messages import AttemptKey, Observation, Orders
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.states import Ending, JobState, VmState
from hpc_grpo.system.readable import printable

_NO_VM = "its VM has no row any more: somebody deleted it"


def take_due(db: Database, settings: FleetSettings) -> list[Vm]:
    """Return the VMs that are due for a visit, and schedule their next visits, so that no other controller gets them.

    Time in which no controller visited a VM does not count towards its loss.
    """
    is_due = vms.c.poll_at <= sa.bindparam("now")
    with db.read() as connection:  # most calls find nothing, and take no lock
        if connection.scalar(sa.select(vms.c.vm_id).where(is_due).limit(1), {"now": db.now(connection)}) is None:
            return []
    with db.write() as connection:
        now = db.now(connection)
        rows = connection.execute(sa.select(vms).where(is_due).with_for_update(skip_locked=True), {"now": now})
        due = [Vm.from_row(row) for row in rows.mappings()]
        seen = sa.case((_is_watched(now, settings), vms.c.last_seen), else_=vms.c.last_seen + (now - vms.c.poll_at))
        values = {"poll_at": now + settings.poll_s, "last_seen": seen}
        if due:
            chosen = sa.update(vms).where(vms.c.vm_id == sa.bindparam("its_id")).values(values)
            connection.execute(chosen, [{"its_id": vm.vm_id} for vm in due])
    return due


def _is_watched(now: float, settings: FleetSettings) -> sa.ColumnElement[bool]:
    """Return the condition that a controller takes care of a VM: its visit is not long overdue."""
    return vms.c.poll_at >= now - settings.stale_s


def missed(db: Database, vm_id: int, why: str) -> None:
    """Record a failed visit. The VM gets no jobs until a visit succeeds."""
    with db.write() as connection:
        state = sa.case((vms.c.state == VmState.READY, VmState.STALE.value), else_=vms.c.state)
        connection.execute(sa.update(vms).where(vms.c.vm_id == vm_id).values(error=printable(why), state=state))


def lose(db: Database, settings: FleetSettings) -> list[AttemptKey]:
    """Mark unseen VMs as stale or lost, and end the attempts on lost ones. Return these attempts.

    Their processes have ended by themselves: the lease and the time for a checkpoint are over. Attempts stay on
    VMs whose visits did not fail or are long overdue: controllers were away, and the next visit reports the jobs.
    """
    with db.write() as connection:
        now = db.now(connection)
        is_old = sa.and_(vms.c.state == VmState.READY, vms.c.last_seen < now - settings.stale_s)
        connection.execute(sa.update(vms).where(is_old).values(state=VmState.STALE))
        limit = now - settings.lost_s
        was_not_seen = sa.or_(vms.c.last_seen.is_(None), vms.c.last_seen < limit)
        is_gone = sa.and_(vms.c.error != "", was_not_seen, _is_watched(now, settings))
        at_lost_vm = (
            sa.select(jobs.c.job_id, jobs.c.attempt, vms.c.name, vms.c.ip_address)
            .join_from(jobs, vms, jobs.c.vm_id == vms.c.vm_id)
            .where(jobs.c.status == JobState.RUNNING, is_gone, jobs.c.changed_at < limit)
            .with_for_update(of=vms)
        )
        over = [
            (AttemptKey(job_id, attempt), f"{name or address} was not seen for {settings.lost_s:.0f} s")
            for job_id, attempt, name, address in connection.execute(at_lost_vm).all()
        ]
        # Jobs of VMs whose rows were deleted. Nobody visits such a VM, so its runners end by themselves within
        # `lost_s` of the first check that missed the row. Until then the jobs' rows say why they wait.
        is_running = jobs.c.status == JobState.RUNNING
        has_vm = sa.exists().where(vms.c.vm_id == jobs.c.vm_id)
        is_noted = jobs.c.failure_reason == _NO_VM
        connection.execute(sa.update(jobs).where(is_running, is_noted, has_vm).values(failure_reason=""))
        without_vm = sa.select(jobs.c.job_id, jobs.c.attempt).where(is_running, is_noted, jobs.c.changed_at < limit)
        over += [(AttemptKey(*row), _NO_VM) for row in connection.execute(without_vm).all()]
        is_new = sa.and_(is_running, ~has_vm, ~is_noted)
        connection.execute(sa.update(jobs).where(is_new).values(failure_reason=_NO_VM, changed_at=now))
        is_lost = sa.and_(vms.c.state == VmState.STALE, is_gone)
        connection.execute(sa.update(vms).where(is_lost).values(state=VmState.LOST, available_gpus=0))
        return [key for key, why in over if end_attempt(connection, key, Ending("lost", why=why), settings, now)]


def attempts_of(db: Database, vm_id: int) -> frozenset[AttemptKey]:
    """Return all attempts that a VM was ever given: its reports count only for these."""
    with db.read() as connection:
        rows = connection.execute(sa.select(attempts.c.job_id, attempts.c.attempt).where(attempts.c.vm_id == vm_id))
        return frozenset(AttemptKey(*row) for row in rows)


def record(
    db: Database, vm_id: int, seen: Observation, has_log: frozenset[AttemptKey], settings: FleetSettings
) -> tuple[Orders, bool]:
    """Commit a visit's observation. Return the orders, and whether the VM has more free GPUs than the database knew.

    `has_log` are the attempts whose complete logs the controller has.
    """
    with db.write() as connection:
        now = db.now(connection)
        is_it = vms.c.vm_id == vm_id
        # This locks the row. If it was deleted during the visit, its jobs' leases run out.
        if connection.execute(sa.update(vms).where(is_it).values(last_seen=now)).rowcount == 0:
            return Orders(), False
        had = connection.scalar(sa.select(vms.c.available_gpus).where(is_it)) or 0
        orders = _settle(connection, vm_id, seen, has_log, settings, now)
        available = 0 if seen.problem else _update_gpus(connection, vm_id, seen, settings)
        state = VmState.STALE if seen.problem else VmState.READY
        values = {"state": state, "error": printable(seen.problem), "available_gpus": available}
        connection.execute(sa.update(vms).where(is_it).values(values))
    return orders, available > had


def _settle(
    connection: sa.Connection,
    vm_id: int,
    seen: Observation,
    has_log: frozenset[AttemptKey],
    settings: FleetSettings,
    now: float,
) -> Orders:
    """Record the attempts that have ended. Return the orders for the others."""
    running = sa.select(jobs).where(jobs.c.vm_id == vm_id, jobs.c.status == JobState.RUNNING)
    rows = connection.execute(running).mappings()
    current: dict[AttemptKey, Mapping[Any, Any]] = {AttemptKey(row["job_id"], row["attempt"]): row for row in rows}
    others = [one.key.job_id for one in seen.attempts if one.key not in current]
    known = sa.select(jobs.c.job_id, jobs.c.attempt, jobs.c.status).where(jobs.c.job_id.in_(others))
    known_rows = connection.execute(known).all() if others else []
    ours = {job_id for job_id, _, _ in known_rows}
    elsewhere = {AttemptKey(job_id, attempt) for job_id, attempt, state in known_rows if state == JobState.RUNNING}
    renew, cancel, forget = [], [], []
    for one in seen.attempts:
        row = current.get(one.key)
        if row is None and (one.key.job_id not in ours or one.key in elsewhere):
            continue  # Of another fleet, of a deleted row, or of this machine's other row. It ends with its lease.
        if one.ended is not None:
            if row is not None:
                end_attempt(connection, one.key, one.ended, settings, now)
            if one.key in has_log:
                forget.append(one.key)
            continue
        if row is None or row["is_cancelled"]:
            cancel.append(one.key)  # without a row: a newer attempt has its job
        if row is not None:
            mark_started(connection, one.key, now)
            renew.append(one.key)
    present = {one.key for one in seen.attempts}
    overdue = [key for key, row in current.items() if key not in present and now - row["changed_at"] > settings.start_s]
    return Orders(tuple(renew), tuple(cancel), tuple(overdue), tuple(forget))


def end_revoked(db: Database, keys: tuple[AttemptKey, ...], settings: FleetSettings) -> None:
    """End attempts that the VM does not have, and will now refuse.

    An attempt that had started ends as lost. Jobs of the other attempts are queued again.
    """
    with db.write() as connection:
        for key in keys:
            had_begun = connection.scalar(sa.select(jobs.c.started_at).where(is_of(key, jobs))) is not None
            why = "its VM no longer knows of it" if had_begun else "it was claimed, and its start never reached the VM"
            ending = Ending("lost" if had_begun else "not_started", why=why)
            end_attempt(connection, key, ending, settings, db.now(connection))


def _update_gpus(connection: sa.Connection, vm_id: int, seen: Observation, settings: FleetSettings) -> int:
    """Update the VM's GPUs, writing only changed ones. Return the number of free GPUs.

    A GPU is also busy if a live attempt uses it without a claim in the database: that attempt is being ended.
    """
    alive = {index for one in seen.attempts if one.ended is None for index in one.gpus}
    found = connection.execute(sa.select(gpus).where(gpus.c.vm_id == vm_id)).mappings()
    rows = {row["gpu_index"]: row for row in found}
    free = 0
    for gpu in {gpu.index: gpu for gpu in seen.gpus}.values():
        row = rows.pop(gpu.index, None)
        is_claimed = row is not None and (row["job_id"] is not None or row["claimed_mib"] > 0)
        is_busy = int(not is_claimed and (is_foreign(gpu, settings) or gpu.index in alive))
        free += not is_claimed and not is_busy
        values: dict[str, Any] = {"uuid": printable(gpu.uuid), "is_busy": is_busy}
        values |= {"memory_mib": gpu.memory_mib, "used_mib": gpu.used_mib}
        if row is None:
            connection.execute(sa.insert(gpus).values(vm_id=vm_id, gpu_index=gpu.index, **values))
        elif any(row[name] != value for name, value in values.items()):
            is_it = sa.and_(gpus.c.vm_id == vm_id, gpus.c.gpu_index == gpu.index)
            connection.execute(sa.update(gpus).where(is_it).values(values))
    for index, row in rows.items():  # GPUs that the VM no longer lists
        if row["job_id"] is None and not row["claimed_mib"]:
            connection.execute(sa.delete(gpus).where(gpus.c.vm_id == vm_id, gpus.c.gpu_index == index))
    return free
