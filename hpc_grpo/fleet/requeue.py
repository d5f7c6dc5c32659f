"""The loop that mends: jobs of lost VMs, and retries that are due."""

from __future__ import annotations

import asyncio

import sqlalchemy as sa

from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import Database
from hpc_grpo.fleet.observe import lose
from hpc_grpo.fleet.schema import jobs
from hpc_grpo.fleet.states import JobState
from hpc_grpo.system.say import say


class Requeuer:
    """Looks every `sweep_s`."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def run(self) -> None:
        """Requeue for ever."""
        while True:
            await self.round()
            await asyncio.sleep(self._controller.settings.sweep_s)

    async def round(self) -> None:
        """Mend once, and announce what is queued again."""
        settings = self._controller.settings
        for key in await asyncio.to_thread(lose, self._controller.db, settings):
            say(f"Job {key.job_id}: its VM is lost, attempt {key.attempt} is over.")
        queued = await asyncio.to_thread(queue_due, self._controller.db)
        if queued:
            await self._controller.bell.ring(queued)


def queue_due(db: Database) -> list[str]:
    """Queue the failed jobs whose retry is due; returns them."""
    with db.read() as connection:
        if not connection.scalars(sa.select(jobs.c.job_id).where(_is_due(db.now(connection))).limit(1)).all():
            return []
    with db.write() as connection:
        now = db.now(connection)
        values = {"status": JobState.QUEUED, "changed_at": now, "retry_at": None}
        change = sa.update(jobs).where(_is_due(now)).values(values).returning(jobs.c.job_id)
        return list(connection.scalars(change))


def _is_due(now: float) -> sa.ColumnElement[bool]:
    return sa.and_(jobs.c.status == JobState.FAILED, jobs.c.retry_at <= now)
