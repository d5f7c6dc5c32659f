"""How one controller keeps up with 1,000 VMs of 8 GPUs and 10,000 jobs, on simulated machines behind `Machine`.

`python benchmarks/fleet_scale.py FOLDER [--vms N] [--jobs N]`. The database, the transactions and the loops are the
fleet's own; a visit takes 50 ms and no processes. A round polls all VMs, mends, and dispatches. A job, of 1, 2, 4 or 8
GPUs, is over at its third poll. After every dispatch it is checked that no job waits while GPUs that fit are free.
"""

from __future__ import annotations

import asyncio
import random
import resource
import sys
import time
from pathlib import Path

import click
import sqlalchemy as sa
from common import load_average, print_table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import Database, jobs
from hpc_grpo.fleet.dispatch import Dispatcher, place_jobs
from hpc_grpo.fleet.messages import AttemptKey, Orders, Outcome
from hpc_grpo.fleet.poll import Poller, Requeuer
from hpc_grpo.fleet.settings import Fleet, FleetSettings
from hpc_grpo.fleet.states import Ending, JobState
from tests.support.simulated_vms import SimulatedVm, add_vms

_VISIT_S = 0.05
_GPUS = 8
_POLLS_OF_A_JOB = 3


class TimedVm(SimulatedVm):
    """A VM whose jobs are over at their third poll; it notes when each was started."""

    def __init__(self, started_at: dict[str, float]) -> None:
        super().__init__(num_gpus=_GPUS, takes_s=_VISIT_S, over=self._over)
        self._started_at = started_at
        self._polls: dict[AttemptKey, int] = {}

    def obey(self, orders: Orders) -> Outcome:
        outcome = super().obey(orders)
        now = time.monotonic()
        self._started_at.update({key.job_id: now for key in outcome.started})
        for key in orders.renew:
            self._polls[key] = self._polls.get(key, 0) + 1
        return outcome

    def _over(self, key: AttemptKey) -> Ending | None:
        return Ending("exit", 0) if self._polls.get(key, 0) >= _POLLS_OF_A_JOB - 1 else None


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--vms", "num_vms", default=1000, show_default=True)
@click.option("--jobs", "num_jobs", default=10_000, show_default=True)
def main(folder: Path, num_vms: int, num_jobs: int) -> None:
    """Measure, and print a table."""
    folder.mkdir(parents=True)
    fleet = Fleet(folder, FleetSettings(poll_s=1e-9), f"sqlite:///{folder / 'fleet.db'}", "")
    started_at: dict[str, float] = {}
    machines: dict[int, TimedVm] = {}
    controller = Controller(fleet, lambda vm: machines[vm.vm_id])
    controller.db.create_tables()
    machines.update({vm_id: TimedVm(started_at) for vm_id in add_vms(controller.db, num_vms)})
    needs = random.Random(0).choices([1, 2, 4, 8], [6, 2, 1, 1], k=num_jobs)
    with controller.db.write() as connection:
        rows = [
            {"job_id": f"job-{n}", "config_name": "c", "num_gpus": need, "submitted_at": n}
            for n, need in enumerate(needs)
        ]
        connection.execute(sa.insert(jobs), rows)
    asyncio.run(measure(controller, started_at, num_jobs))


async def measure(controller: Controller, started_at: dict[str, float], num_jobs: int) -> None:
    """Go round until all jobs are completed."""
    polls, sweeps, latencies, began = [], [], [], time.monotonic()
    while completed(controller.db) < num_jobs:
        polls.append(await timed(Poller(controller).round()))
        await Requeuer(controller).round()
        sweep_at, known = time.monotonic(), set(started_at)
        sweeps.append(await timed(Dispatcher(controller).round()))
        latencies += [at - sweep_at for job_id, at in started_at.items() if job_id not in known]
        assert_nothing_waits(controller.db)
    whole_s = time.monotonic() - began
    print(load_average())
    rows = [[name, *(f"{quantile(values, q):.2f}" for q in (0.5, 0.99, 1.0))] for name, values in
            (("poll round", polls), ("dispatch round", sweeps), ("job waits for its start", latencies))]  # fmt: skip
    print_table("One controller, SQLite; seconds", ["", "p50", "p99", "most"], rows)
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{num_jobs:,} jobs completed in {len(polls)} rounds, {whole_s:.0f} s; one attempt each; {memory_mib:.0f} MiB"
    )


async def timed(round_of: object) -> float:
    began = time.monotonic()
    await round_of  # type: ignore[misc]
    return time.monotonic() - began


def completed(db: Database) -> int:
    with db.read() as connection:
        done = sa.and_(jobs.c.status == JobState.COMPLETED, jobs.c.attempt == 1)
        return int(connection.scalar(sa.select(sa.func.count()).select_from(jobs).where(done)) or 0)


def assert_nothing_waits(db: Database) -> None:
    """Fail where a waiting job would fit on free GPUs of a VM."""
    assert not place_jobs(db)[0]


def quantile(values: list[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, round(share * (len(values) - 1)))]


if __name__ == "__main__":
    main()
