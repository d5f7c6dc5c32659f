"""Transactions on a job: claim it with its GPUs, confirm the claim, end an attempt, cancel, queue again.

Each is a compare-and-set on the job's row, and checks the number of changed rows. A claim gets all of its GPUs or none.
One transaction changes a job's state and releases its GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from hpc_grpo.fleet.db import Database, attempts, gpus, jobs, vms
from hpc_grpo.fleet.messages import ORDERS_S, AttemptKey, GpuSeen
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.states import Ending, JobState, Verdict, VmState, judge
from hpc_grpo.system.readable import printable


@dataclass(frozen=True)
class Placement:
    """A job, its newest attempt when it was read, and GPUs of a VM with room for the job.

    `gpu_memory_mib` is the job's memory on each GPU, 0 for exclusive GPUs.
    """

    job_id: str
    attempt: int
    vm_id: int
    gpus: tuple[int, ...]
    gpu_memory_mib: int = 0


def claim(db: Database, place: Placement) -> AttemptKey | None:
    """Claim a job together with its GPUs; None if the job or one of the GPUs is no longer free."""
    with db.write() as connection:
        if (key := _claim(connection, place, db.now(connection))) is None:
            connection.rollback()  # another controller was first
        return key


def _claim(connection: sa.Connection, place: Placement, now: float) -> AttemptKey | None:
    # A row that was deleted and added again starts at 0 again, and VMs refuse attempt numbers that they have seen.
    newest = connection.scalar(sa.select(sa.func.max(attempts.c.attempt)).where(attempts.c.job_id == place.job_id))
    key = AttemptKey(place.job_id, max(place.attempt, newest or 0) + 1)
    is_ready = sa.and_(vms.c.vm_id == place.vm_id, vms.c.state == VmState.READY, vms.c.is_drained == 0)
    share = place.gpu_memory_mib
    has_room = gpus.c.memory_mib - gpus.c.claimed_mib >= share if share else gpus.c.claimed_mib == 0
    its_gpus = sa.and_(gpus.c.vm_id == place.vm_id, gpus.c.gpu_index.in_(place.gpus))
    is_free = sa.and_(its_gpus, gpus.c.job_id.is_(None), gpus.c.is_busy == 0, has_room)
    has_vm = connection.execute(sa.select(vms.c.vm_id).where(is_ready).with_for_update(read=True)).first()
    # On PostgreSQL, skip GPUs that another claim has locked. SQLite has one writer at a time anyway.
    locked = connection.execute(sa.select(gpus.c.gpu_index).where(is_free).with_for_update(skip_locked=True)).all()
    is_queued = sa.and_(jobs.c.job_id == key.job_id, jobs.c.attempt == place.attempt, jobs.c.status == JobState.QUEUED)
    taken_job = sa.update(jobs).where(is_queued).values(
        status=JobState.RUNNING,
        attempt=key.attempt,
        vm_id=place.vm_id,
        started_at=None,
        changed_at=now,
        retry_at=None,
        failure_reason="",
        exit_code=None,
    )  # fmt: skip
    claimed: dict[str, Any] = {"claimed_mib": gpus.c.claimed_mib + share} if share else key._asdict()
    taken_gpus = sa.update(gpus).where(is_free).values(claimed)
    if (
        has_vm is None
        or len(locked) != len(place.gpus)
        or connection.execute(taken_job).rowcount != 1
        or connection.execute(taken_gpus).rowcount != len(place.gpus)
    ):
        return None
    entry = {"vm_id": place.vm_id, "gpus": json.dumps(sorted(place.gpus)), "gpu_memory_mib": share, "claimed_at": now}
    connection.execute(sa.insert(attempts).values(**key._asdict(), **entry))
    return key


def confirm(
    db: Database, vm_id: int, keys: Sequence[AttemptKey], seen: Sequence[GpuSeen], settings: FleetSettings
) -> dict[AttemptKey, Mapping[str, Any]]:
    """Return the rows of claims that may start now on a VM that has just answered, with their `gpus`.

    Releases the other claims, for example on a GPU that a foreign process uses, and queues their jobs again. The VM
    counts as seen: its jobs do not count as lost until the lease of a job started now would have ended.
    """
    with db.write() as connection:
        now = db.now(connection)
        is_gone = connection.execute(sa.update(vms).where(vms.c.vm_id == vm_id).values(last_seen=now)).rowcount == 0
        shared = sa.select(gpus.c.gpu_index, gpus.c.claimed_mib).where(gpus.c.vm_id == vm_id)
        claimed_mib = dict(map(tuple, connection.execute(shared)))
        may_start: dict[AttemptKey, Mapping[str, Any]] = {}
        for key in keys:
            row = connection.execute(sa.select(jobs).where(_is_current(key)).with_for_update()).mappings().first()
            if row is None:
                continue
            claimed, share = _claimed_gpus(connection, key)
            busy = [
                gpu.index
                for gpu in seen
                if gpu.index in claimed and is_foreign(gpu, settings, claimed_mib.get(gpu.index, share) - share)
            ]
            if busy:
                is_one = sa.and_(gpus.c.vm_id == vm_id, gpus.c.gpu_index.in_(busy))
                connection.execute(sa.update(gpus).where(is_one).values(is_busy=1))
            reasons = {
                "it was cancelled": row["is_cancelled"],
                "its VM's row was deleted": is_gone,
                "its GPUs were taken by somebody else": busy,
                "its VM was reached too late": now - row["changed_at"] > settings.start_s - 2 * ORDERS_S,
            }
            if why := next((why for why, holds in reasons.items() if holds), ""):
                end_attempt(connection, key, Ending("not_started", why=why), settings, now)
            else:
                may_start[key] = {**row, "gpus": claimed}
    return may_start


def end_attempts(db: Database, keys: Sequence[AttemptKey], end: Ending, settings: FleetSettings) -> None:
    """End attempts, all by `end`, in one transaction."""
    with db.write() as connection:
        for key in keys:
            end_attempt(connection, key, end, settings, db.now(connection))


def end_attempt(
    connection: sa.Connection, key: AttemptKey, end: Ending, settings: FleetSettings, now: float
) -> Verdict | None:
    """Give the job its next state and release its GPUs. For an older attempt, change nothing and return None."""
    row = connection.execute(sa.select(jobs).where(_is_current(key)).with_for_update()).mappings().first()
    if row is None:
        return None
    verdict = judge(row, end, settings)
    why = printable(end.why)  # PostgreSQL accepts no NUL
    values = {
        "status": verdict.state,
        "retry_count": verdict.retry_count,
        "stalled": verdict.stalled,
        "failure_reason": "" if verdict.state == JobState.COMPLETED else why,
        "exit_code": end.code,
        "changed_at": now,
        "retry_at": None if verdict.retry_in_s is None else now + verdict.retry_in_s,
        "step": row["step"] if end.step is None else end.step,
    }
    if connection.execute(sa.update(jobs).where(_is_current(key)).values(values)).rowcount != 1:
        return None
    connection.execute(sa.update(gpus).where(is_of(key, gpus)).values(job_id=None, attempt=None))
    claimed, share = _claimed_gpus(connection, key)
    if share:
        is_shared = sa.and_(gpus.c.vm_id == row["vm_id"], gpus.c.gpu_index.in_(claimed))
        connection.execute(sa.update(gpus).where(is_shared).values(claimed_mib=gpus.c.claimed_mib - share))
    closed = {"ended_at": now, "outcome": end.kind, "exit_code": end.code, "reason": why}
    connection.execute(sa.update(attempts).where(is_of(key, attempts)).values(closed))
    return verdict


def mark_started(connection: sa.Connection, key: AttemptKey, now: float) -> None:
    """Record that the VM has started the attempt."""
    is_new = sa.and_(_is_current(key), jobs.c.started_at.is_(None))
    if connection.execute(sa.update(jobs).where(is_new).values(started_at=now)).rowcount:
        connection.execute(sa.update(attempts).where(is_of(key, attempts)).values(started_at=now))


def cancel(db: Database, job_id: str) -> JobState:
    """Cancel a job, or let its VM end it at the next visit. Return the job's state, unchanged if it has ended."""
    with db.write() as connection:
        is_it = jobs.c.job_id == job_id
        row = connection.execute(sa.select(jobs).where(is_it).with_for_update()).mappings().one()
        state = JobState(row["status"])
        values: dict[str, Any] = {}
        if state == JobState.RUNNING:
            values = {"is_cancelled": 1}
        elif state == JobState.QUEUED or (state == JobState.FAILED and row["retry_at"] is not None):
            state = JobState.CANCELLED
            values = {"status": state, "changed_at": db.now(connection), "retry_at": None}
        if values:
            connection.execute(sa.update(jobs).where(is_it).values(values))
        return state


def queue_again(db: Database, job_id: str) -> JobState:
    """Queue an ended job again, with its full number of retries. Return its old state.

    Changes nothing if the job is queued or running.
    """
    with db.write() as connection:
        is_it = jobs.c.job_id == job_id
        state = JobState(connection.scalars(sa.select(jobs.c.status).where(is_it).with_for_update()).one())
        if state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED):
            fresh = {"retry_count": 0, "stalled": 0, "is_cancelled": 0, "retry_at": None, "exit_code": None}
            values = {"status": JobState.QUEUED, "changed_at": db.now(connection), **fresh}
            connection.execute(sa.update(jobs).where(is_it).values(values))
        return state


def is_of(key: AttemptKey, table: sa.Table) -> sa.ColumnElement[bool]:
    return sa.and_(table.c.job_id == key.job_id, table.c.attempt == key.attempt)


def _is_current(key: AttemptKey) -> sa.ColumnElement[bool]:
    return sa.and_(is_of(key, jobs), jobs.c.status == JobState.RUNNING)


def _claimed_gpus(connection: sa.Connection, key: AttemptKey) -> tuple[tuple[int, ...], int]:
    """Return the indices of an attempt's GPUs, and its MiB on each; 0 for exclusive GPUs."""
    found = sa.select(attempts.c.gpus, attempts.c.gpu_memory_mib).where(is_of(key, attempts))
    row = connection.execute(found).first()
    return (tuple(json.loads(row.gpus)), row.gpu_memory_mib) if row else ((), 0)


def is_foreign(gpu: GpuSeen, settings: FleetSettings, shared_mib: int = 0) -> bool:
    """Return whether a process that is no job of the fleet uses a GPU. Jobs that share the GPU may use `shared_mib`."""
    has_strangers = gpu.num_processes > 0 and not shared_mib
    return has_strangers or gpu.used_mib > settings.free_memory_mib + shared_mib
