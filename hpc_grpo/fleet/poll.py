"""The loops that keep the database up to date: one visits VMs and renews leases, one ends lost attempts and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import sqlalchemy as sa

from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import Database, DatabaseAwayError, jobs
from hpc_grpo.fleet.machine import VisitError, Vm
from hpc_grpo.fleet.messages import AttemptKey, AttemptSeen, Observation, Orders, Request
from hpc_grpo.fleet.observe import attempts_of, end_revoked, lose, record, take_due
from hpc_grpo.fleet.states import JobState
from hpc_grpo.system.say import say

_LOOK_S = 0.5
_MAX_AT_ONCE = 256
_MAX_PIECES = 64
"""Limit of visits in a row to fetch a VM's logs: a job may print without end."""


class Poller:
    """Visits each due VM in its own task: a VM that does not answer delays no other."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._known: dict[int, tuple[AttemptKey, ...]] = {}
        self._busy: dict[int, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(_MAX_AT_ONCE)

    async def run(self) -> None:
        try:
            while True:
                await self._start_due()
                await asyncio.sleep(min(_LOOK_S, self._controller.settings.poll_s / 4))
        finally:
            for task in self._busy.values():
                task.cancel()

    async def round(self) -> None:
        """Visit the VMs that are due, and wait until the visits end."""
        await self._start_due()
        await asyncio.gather(*self._busy.values())

    async def _start_due(self) -> None:
        for vm in await asyncio.to_thread(take_due, self._controller.db, self._controller.settings):
            if vm.vm_id not in self._busy:
                self._busy[vm.vm_id] = asyncio.create_task(self._poll(vm))

    async def _poll(self, vm: Vm) -> None:
        try:
            async with self._slots:
                for _ in range(_MAX_PIECES):
                    if not await self.visit(vm):
                        return
        except DatabaseAwayError:
            return  # the loop reports it; nothing was renewed
        finally:
            del self._busy[vm.vm_id]

    async def visit(self, vm: Vm) -> bool:
        """Visit a VM once. Return whether the VM has more log data than one visit carries."""
        controller = self._controller
        settings = controller.settings
        offsets = {key.folder: controller.logs.size(key) for key in self._known.get(vm.vm_id, ())}
        has_more = False

        async def decide(seen: Observation) -> Orders:
            nonlocal has_more
            self._known[vm.vm_id] = tuple(one.key for one in seen.attempts)
            own = await asyncio.to_thread(attempts_of, controller.db, vm.vm_id)
            own_seen = [one for one in seen.attempts if one.key in own]
            complete, has_more = await asyncio.to_thread(self._keep_logs, own_seen, offsets)
            orders, has_room = await asyncio.to_thread(record, controller.db, vm.vm_id, seen, complete, settings)
            if has_room:
                controller.bell.nudge()
            return orders

        try:
            outcome = await controller.visit(vm, Request(vm.work_dir, vm.nvidia_smi, offsets), decide)
        except VisitError:
            return False
        if outcome.revoked:
            await asyncio.to_thread(end_revoked, controller.db, outcome.revoked, settings)
            controller.bell.nudge()
        return has_more

    def _keep_logs(self, seen: Sequence[AttemptSeen], offsets: dict[str, int]) -> tuple[frozenset[AttemptKey], bool]:
        """Write the pieces of logs. Return the attempts whose log is complete, and whether any log has more."""
        is_complete: dict[AttemptKey, bool] = {}
        for one in seen:
            try:
                is_complete[one.key] = self._controller.logs.add(one, offsets.get(one.key.folder, 0))
            except OSError as error:
                say(f"The log of {one.key.job_id} could not be kept: {error}")
        return frozenset(key for key, whole in is_complete.items() if whole), not all(is_complete.values())


class Requeuer:
    """Every `sweep_s`, ends attempts on lost VMs and queues failed jobs whose retry is due."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def run(self) -> None:
        while True:
            await self.round()
            await asyncio.sleep(self._controller.settings.sweep_s)

    async def round(self) -> None:
        """Do one pass, and announce the jobs that it queued."""
        for key in await asyncio.to_thread(lose, self._controller.db, self._controller.settings):
            say(f"Job {key.job_id}: its VM is lost, attempt {key.attempt} is over.")
        if queued := await asyncio.to_thread(queue_due, self._controller.db):
            await self._controller.bell.ring(queued)


def queue_due(db: Database) -> list[str]:
    """Queue the failed jobs whose retry is due, and return them."""
    is_due = sa.and_(jobs.c.status == JobState.FAILED, jobs.c.retry_at <= sa.bindparam("now"))
    with db.read() as connection:  # most calls find nothing, and take no lock
        if connection.scalar(sa.select(jobs.c.job_id).where(is_due).limit(1), {"now": db.now(connection)}) is None:
            return []
    with db.write() as connection:
        now = db.now(connection)
        values = {"status": JobState.QUEUED, "changed_at": now, "retry_at": None}
        change = sa.update(jobs).where(is_due).values(values).returning(jobs.c.job_id)
        return list(connection.scalars(change, {"now": now}))
