"""VMs in memory behind the Protocol `Machine`: time is what a test says, jobs end when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sqlalchemy as sa

from hpc_grpo.fleet.db import Database, jobs, vms
from hpc_grpo.fleet.machine import Decide, VisitError, Vm
from hpc_grpo.fleet.messages import AttemptKey, AttemptSeen, GpuSeen, Observation, Orders, Outcome, Request
from hpc_grpo.fleet.states import Ending


@dataclass
class SimulatedVm:
    """What is on one VM. `foreign` are GPUs that somebody else uses; `is_away`: no visit reaches it.

    `takes_s` is how long a visit takes. `over` is asked of each attempt at each visit: how it has ended, None if not.
    """

    num_gpus: int = 4
    foreign: set[int] = field(default_factory=set)
    is_away: bool = False
    takes_s: float = 0.0
    over: Callable[[AttemptKey], Ending | None] = lambda _key: None
    logs: dict[AttemptKey, bytes] = field(default_factory=dict)
    specs: dict[AttemptKey, dict[str, Any]] = field(default_factory=dict)
    ended: dict[AttemptKey, Ending] = field(default_factory=dict)
    renewed: list[AttemptKey] = field(default_factory=list)
    revoked: set[AttemptKey] = field(default_factory=set)
    num_closed: int = 0

    async def visit(self, request: Request, decide: Decide) -> Outcome:
        await asyncio.sleep(self.takes_s)
        if self.is_away:
            raise VisitError("no route to host", is_before_orders=True)
        orders = await decide(self.observe(request.log_offsets))
        return self.obey(orders) if orders else Outcome((), (), (), "")

    async def close(self) -> None:
        self.num_closed += 1

    def observe(self, log_offsets: Mapping[str, int] = MappingProxyType({})) -> Observation:
        """Return what a visit sees; of each log eight bytes, from the offset that the controller has."""
        for key in self.specs:
            if key not in self.ended and (end := self.over(key)):
                self.ended[key] = end
        gpus = tuple(
            GpuSeen(i, f"GPU-{i}", 81559, 9 * (i in self.foreign), i in self.foreign) for i in range(self.num_gpus)
        )
        seen = []
        for key, spec in self.specs.items():
            log, offset = self.logs.get(key, b""), log_offsets.get(key.folder, 0)
            piece = log[offset : offset + 8]
            seen.append(AttemptSeen(key, tuple(spec["gpus"]), self.ended.get(key), len(log), piece))
        return Observation(gpus, tuple(seen), "")

    def obey(self, orders: Orders) -> Outcome:
        self.renewed = list(orders.renew)
        for key in orders.cancel:
            self.ended.setdefault(key, Ending("exit", 75, "it was cancelled"))
        revoked = tuple(key for key in orders.revoke if key not in self.specs)
        self.revoked |= set(revoked)
        for key in orders.forget:
            self.specs.pop(key, None)
        started = []
        for spec in orders.start:
            key = AttemptKey(spec["job_id"], spec["attempt"])
            assert key not in self.revoked | self.specs.keys()
            self.specs[key] = spec
            started.append(key)
        return Outcome(tuple(started), revoked, (), "")


def add_vms(db: Database, count: int, **values: Any) -> list[int]:
    """Add rows of VMs, named vm-1 and so on; return their ids."""
    with db.write() as connection:
        rows = [{"name": f"vm-{i}", "ip_address": f"10.0.{i // 250}.{i % 250}", **values} for i in range(1, count + 1)]
        connection.execute(sa.insert(vms), rows)
        return list(connection.scalars(sa.select(vms.c.vm_id).order_by(vms.c.vm_id)))


def add_jobs(db: Database, count: int, **values: Any) -> None:
    """Add rows of jobs, named job-1 and so on, as anybody's INSERT would."""
    with db.write() as connection:
        connection.execute(
            sa.insert(jobs),
            [
                {"job_id": f"job-{i}", "model": "m", "dataset": "d", "reward_function": "r", **values}
                for i in range(1, count + 1)
            ],
        )


def row_of(db: Database, job_id: str) -> dict[str, Any]:
    with db.read() as connection:
        return dict(connection.execute(sa.select(jobs).where(jobs.c.job_id == job_id)).mappings().one())


def vm_of(db: Database, vm_id: int) -> Vm:
    with db.read() as connection:
        return Vm.from_row(connection.execute(sa.select(vms).where(vms.c.vm_id == vm_id)).mappings().one())
