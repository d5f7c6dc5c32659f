"""Jobs and VMs as users see them: submit a job, list jobs, show one with its attempts; add, list, drain, remove VMs."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.fleet.db import HAS_ROOM, IS_FREE, Database, attempts, gpus, jobs, vm_name, vms
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.spec import make_spec, secrets_of
from hpc_grpo.fleet.states import JobState

_LONGEST_ID = 200

_OF_VM = sa.select(sa.func.count().label("free")).join_from(gpus, vms).where(IS_FREE).group_by(gpus.c.vm_id).subquery()
_MOST_FREE = sa.select(sa.func.coalesce(sa.func.max(_OF_VM.c.free), 0)).scalar_subquery()
_HAS_SHARES = (
    sa.select(gpus.c.vm_id)
    .join_from(gpus, vms)
    .where(HAS_ROOM, gpus.c.memory_mib - gpus.c.claimed_mib >= jobs.c.gpu_memory_mib)
    .group_by(gpus.c.vm_id)
    .having(sa.func.count() >= jobs.c.num_gpus)
    .correlate(jobs)
    .exists()
)
_HAS_NO_PLACE = sa.case((jobs.c.gpu_memory_mib == 0, jobs.c.num_gpus > _MOST_FREE), else_=~_HAS_SHARES)
_IS_PENDING = sa.and_(jobs.c.status == JobState.QUEUED, _HAS_NO_PLACE)
_STATE = sa.case((_IS_PENDING, sa.literal(JobState.PENDING)), else_=jobs.c.status).label("state")
_IS_NEWEST = sa.and_(attempts.c.job_id == jobs.c.job_id, attempts.c.attempt == jobs.c.attempt)
_WITH_VM = sa.select(jobs, _STATE, vm_name.label("vm"), attempts.c.gpus.label("gpus")).select_from(
    jobs.outerjoin(vms, jobs.c.vm_id == vms.c.vm_id).outerjoin(attempts, _IS_NEWEST)
)
"""Rows of jobs, each with its `state`, the name of its VM and its GPUs."""


def submit_job(db: Database, job: Mapping[str, Any], settings: FleetSettings) -> str:
    """Add a job and return its id. Raises ConfigError for a job that can never run, or an id that is taken.

    `job` has the columns about what to run and its resources. `job_id` "" makes an id; `max_retries` None uses the
    fleet's number.
    """
    job_id = job["job_id"] or f"job-{secrets.token_hex(4)}"
    if len(job_id) > _LONGEST_ID:
        raise ConfigError(f"job_id = {job_id[:20]!r}… must have at most {_LONGEST_ID} characters.")
    if job_id.endswith(".log"):  # the log of job `a` is a.log
        raise ConfigError(f"job_id = {job_id!r} must not end in .log: that is the name of a log.")
    texts = {"job_id": job_id, "overrides": json.dumps(job["overrides"])}
    values = {**job, **texts, "use_unsloth": int(job["use_unsloth"])}
    if named := [name for name, value in values.items() if isinstance(value, str) and "\0" in value]:
        raise ConfigError(f"{named[0]} must not hold the character NUL.")
    make_spec({**values, "attempt": 1}, (0,), settings)
    if found := secrets_of(values):
        raise ConfigError(
            f"A job must not hold secrets, and these do: {', '.join(found)}. The database keeps a job's text. Set the "
            f"secret in the environment on the VMs, and name its variable in launch.pass_env or api_key_env."
        )
    try:
        with db.write() as connection:
            now = db.now(connection)
            connection.execute(sa.insert(jobs).values(**values, submitted_at=now, changed_at=now))
    except sa.exc.IntegrityError as error:
        raise ConfigError(
            f"job_id = {job_id!r} must be new, and a job has this id. Leave it out, or choose another."
        ) from error
    return job_id


def list_jobs(db: Database, states: Sequence[str] = (), limit: int = 1000) -> list[dict[str, Any]]:
    """Return rows of jobs, the newest first."""
    query = _WITH_VM.order_by(jobs.c.submitted_at.desc(), jobs.c.job_id).limit(limit)
    if states:
        query = query.where(_STATE.in_(states))
    with db.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def count_jobs(db: Database) -> dict[str, int]:
    """Return how many jobs there are in each state."""
    with db.read() as connection:
        rows = connection.execute(sa.select(_STATE, sa.func.count()).group_by(_STATE)).all()
    found: dict[str, int] = {str(state): int(number) for state, number in rows}
    return {state.value: found.get(state, 0) for state in JobState}


def find_job(db: Database, job_id: str) -> dict[str, Any]:
    """Return a job's row. Raises ConfigError with near matches."""
    with db.read() as connection:
        row = connection.execute(_WITH_VM.where(jobs.c.job_id == job_id)).mappings().first()
        if row is not None:
            return dict(row)
        known = list(connection.scalars(sa.select(jobs.c.job_id).order_by(jobs.c.submitted_at.desc()).limit(1000)))
    raise ConfigError(
        f"JOB = {job_id!r} must be the id of a job{nearest(job_id, known)} `hpc-grpo place fleet jobs` lists them."
    )


def job_attempts(db: Database, job_id: str) -> list[Mapping[Any, Any]]:
    """Return the rows of a job's attempts in order, each with the name of its VM."""
    query = sa.select(attempts, vm_name.label("vm")).outerjoin(vms, attempts.c.vm_id == vms.c.vm_id)
    with db.read() as connection:
        rows = connection.execute(query.where(attempts.c.job_id == job_id).order_by(attempts.c.attempt))
        return list(rows.mappings())


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
        change = sa.update(vms).where(vms.c.vm_id == _vm_id(connection, name)).values(is_drained=int(is_drained))
        connection.execute(change)


def remove_vm(db: Database, name: str) -> None:
    """Remove a VM and its GPUs from the fleet. Raises ConfigError if jobs run on it."""
    with db.write() as connection:
        vm_id = _vm_id(connection, name)
        is_on_it = sa.and_(jobs.c.vm_id == vm_id, jobs.c.status == JobState.RUNNING)
        if running := connection.scalars(sa.select(jobs.c.job_id).where(is_on_it)).all():
            raise ConfigError(
                f"A VM that is removed must have no jobs, and {name} has {', '.join(running[:5])}. "
                f"`hpc-grpo place fleet vm drain {name}` keeps new jobs off. Cancel these jobs, or wait for them."
            )
        connection.execute(sa.delete(vms).where(vms.c.vm_id == vm_id))


def _vm_id(connection: sa.Connection, name: str) -> int:
    if (vm_id := connection.scalar(sa.select(vms.c.vm_id).where(vm_name == name))) is not None:
        return int(vm_id)
    names = list(connection.scalars(sa.select(vm_name)))
    raise ConfigError(
        f"VM = {name!r} must be a VM's name{nearest(name, names)} `hpc-grpo place fleet vm list` lists them."
    )
