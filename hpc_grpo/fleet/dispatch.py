"""The loop that gives free GPUs to waiting jobs: claims in the database, then a visit that starts the runners."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from hpc_grpo.errors import EXIT_CONFIG, EXIT_UNAVAILABLE, ConfigError
from hpc_grpo.fleet.claims import Placement, claim, confirm, end_attempts, mark_started
from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import HAS_ROOM, Database, DatabaseAwayError, gpus, jobs, vms
from hpc_grpo.fleet.machine import VisitError, Vm
from hpc_grpo.fleet.messages import AttemptKey, Observation, Orders, Outcome, Request
from hpc_grpo.fleet.spec import make_spec
from hpc_grpo.fleet.states import Ending, JobState
from hpc_grpo.system.say import say

_CLAIMED_AT_ONCE = 64


class Dispatcher:
    """Sweeps over waiting jobs when the bell rings, when GPUs become free, and every `sweep_s`."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._starting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        while True:
            announced = await self._controller.bell.wait(self._controller.settings.sweep_s)
            if announced:
                await asyncio.to_thread(_report_unknown, self._controller.db, announced)
            await self.sweep()

    async def sweep(self) -> None:
        """Claim GPUs for all jobs that fit, and start the jobs. Starting overlaps with further claims."""
        db = self._controller.db
        placements, machines = await asyncio.to_thread(place_jobs, db)
        for first in range(0, len(placements), _CLAIMED_AT_ONCE):
            claimed = await asyncio.to_thread(claim_each, db, placements[first : first + _CLAIMED_AT_ONCE])
            for vm_id, keys in claimed.items():
                task = asyncio.create_task(self.start(machines[vm_id], keys))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)

    async def round(self) -> None:
        """Sweep, and wait until every start was tried."""
        await self.sweep()
        await asyncio.gather(*self._starting)

    async def start(self, vm: Vm, keys: Sequence[AttemptKey]) -> None:
        """Start claimed jobs on their VM. The poller handles claims that stay undecided here."""
        controller = self._controller
        settings = controller.settings

        async def decide(seen: Observation) -> Orders | None:
            rows = await asyncio.to_thread(confirm, controller.db, vm.vm_id, keys, seen.gpus, settings)
            specs = await asyncio.to_thread(self._specs, rows)
            return Orders(start=tuple(specs)) if specs else None

        # Without the database the claims stay; once their start is overdue, the poller revokes them.
        with contextlib.suppress(DatabaseAwayError):
            try:
                outcome = await controller.visit(vm, Request(vm.work_dir, vm.nvidia_smi, with_logs=False), decide)
                await asyncio.to_thread(self._note, outcome)
            except VisitError as error:
                if error.is_before_orders:
                    end = Ending("not_started", why=f"{vm.name} was not reached: {error}")
                    await asyncio.to_thread(end_attempts, controller.db, keys, end, settings)

    def _specs(self, rows: Mapping[AttemptKey, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the specs for the VM. A job whose row gives no program to run fails permanently."""
        specs, settings = [], self._controller.settings
        for key, row in rows.items():
            try:
                specs.append(make_spec(row, row["gpus"], settings))
            except ConfigError as error:
                end_attempts(self._controller.db, [key], Ending("exit", EXIT_CONFIG, str(error)), settings)
        return specs

    def _note(self, outcome: Outcome) -> None:
        db, settings = self._controller.db, self._controller.settings
        for key, why in outcome.failed:
            end_attempts(db, [key], Ending("exit", EXIT_UNAVAILABLE, why), settings)
        if outcome.started:
            with db.write() as connection:
                now = db.now(connection)
                for key in outcome.started:
                    mark_started(connection, key, now)


class FreeGpus:
    """Free room on GPUs by VM, used to place jobs one after another: MiB of each GPU, and which GPUs no job uses."""

    def __init__(self, rows: Iterable[tuple[int, int, int, bool]]) -> None:
        """`rows` have a VM's id, a GPU's index, its unclaimed MiB, and whether no job uses it."""
        self._mib: dict[int, dict[int, int]] = defaultdict(dict)
        self._unused: dict[int, dict[int, None]] = defaultdict(dict)
        self._by_count: dict[int, dict[int, None]] = defaultdict(dict)
        """Number of unused GPUs -> the VMs that have this number."""
        for vm_id, index, free_mib, is_unused in rows:
            self._mib[vm_id][index] = free_mib
            if is_unused:
                self._unused[vm_id][index] = None
        for vm_id, free in self._unused.items():
            self._by_count[len(free)][vm_id] = None

    def take(self, count: int, preferred: int | None, share_mib: int = 0) -> tuple[int, tuple[int, ...]] | None:
        """Take `count` GPUs of one VM, or `share_mib` MiB on each. Return the VM's id and the GPUs' indices.

        Takes the preferred VM if it has enough, else the fullest VM that has enough. Returns None if there is none.
        """
        found = self._find_shares(count, preferred, share_mib) if share_mib else self._find_unused(count, preferred)
        if found is not None:
            vm_id, indices = found
            self._by_count[len(self._unused[vm_id])].pop(vm_id, None)
            for index in indices:
                self._unused[vm_id].pop(index, None)
                self._mib[vm_id][index] -= share_mib or self._mib[vm_id][index]
            self._by_count[len(self._unused[vm_id])][vm_id] = None
        return found

    def _find_unused(self, count: int, preferred: int | None) -> tuple[int, tuple[int, ...]] | None:
        vm_id = preferred if preferred is not None and len(self._unused.get(preferred, ())) >= count else None
        if vm_id is None:
            fitting = [free for free, ids in self._by_count.items() if free >= count and ids]
            if not fitting:
                return None
            vm_id = next(iter(self._by_count[min(fitting)]))
        return vm_id, tuple(self._unused[vm_id])[:count]

    def _find_shares(self, count: int, preferred: int | None, share_mib: int) -> tuple[int, tuple[int, ...]] | None:
        """Find the fullest GPUs with room. Checks all VMs: fleets whose jobs share GPUs are small."""
        found: dict[int, list[tuple[int, int]]] = {}
        for vm_id, mib in self._mib.items():
            fullest = sorted((free, index) for index, free in mib.items() if free >= share_mib)[:count]
            if len(fullest) == count:
                found[vm_id] = fullest
        if not found:
            return None
        vm_id = preferred if preferred in found else min(found, key=lambda one: found[one])
        return vm_id, tuple(sorted(index for _, index in found[vm_id]))


def place_jobs(db: Database) -> tuple[list[Placement], dict[int, Vm]]:
    """Find free GPUs for every queued job that fits, by priority and age. Changes nothing. Also returns the VMs by id.

    A job returns to the VM of its newest attempt, if that VM has room: its checkpoints may be there.
    """
    with db.read() as connection:
        room = (gpus.c.memory_mib - gpus.c.claimed_mib, gpus.c.claimed_mib == 0)
        found = sa.select(gpus.c.vm_id, gpus.c.gpu_index, *room).join_from(gpus, vms).where(HAS_ROOM)
        free = FreeGpus(connection.execute(found.order_by(*gpus.primary_key)))
        wanted = sa.select(jobs.c.job_id, jobs.c.attempt, jobs.c.num_gpus, jobs.c.vm_id, jobs.c.gpu_memory_mib)
        order = (jobs.c.priority.desc(), jobs.c.submitted_at, jobs.c.job_id)
        waiting = connection.execute(wanted.where(jobs.c.status == JobState.QUEUED).order_by(*order)).all()
        machines = {row["vm_id"]: Vm.from_row(row) for row in connection.execute(sa.select(vms)).mappings()}
    placements = [
        Placement(job.job_id, job.attempt, *taken, max(0, job.gpu_memory_mib))
        for job in waiting
        if (taken := free.take(max(1, job.num_gpus), job.vm_id, max(0, job.gpu_memory_mib))) is not None
    ]
    return placements, machines


def claim_each(db: Database, placements: Sequence[Placement]) -> dict[int, list[AttemptKey]]:
    """Claim each planned placement in its own transaction. Return the successful claims by VM."""
    claimed: dict[int, list[AttemptKey]] = defaultdict(list)
    for place in placements:
        if key := claim(db, place):
            claimed[place.vm_id].append(key)
    return claimed


def _report_unknown(db: Database, job_ids: Sequence[str]) -> None:
    """Print the announced job ids that have no row in the table `jobs`."""
    with db.read() as connection:
        known = set(connection.scalars(sa.select(jobs.c.job_id).where(jobs.c.job_id.in_(job_ids))))
    for job_id in dict.fromkeys(job_ids):
        if job_id not in known:
            say(f"Job {job_id!r} was announced, but has no row in the table jobs.")
