"""The loops on simulated VMs: what is claimed, started, lost, tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from hpc_grpo.fleet.claims import Placement, cancel, claim
from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import Database, jobs, vms
from hpc_grpo.fleet.dispatch import Dispatcher, FreeGpus
from hpc_grpo.fleet.jobs import count_jobs, find_job, list_jobs, list_vms
from hpc_grpo.fleet.messages import AttemptKey, Observation
from hpc_grpo.fleet.observe import lose, missed
from hpc_grpo.fleet.poll import Poller, Requeuer
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.states import Ending, JobState, VmState
from tests.support.simulated_vms import SimulatedVm, add_jobs, row_of, vm_of

Make = Callable[..., tuple[Controller, dict[int, SimulatedVm]]]
EAGER = FleetSettings(poll_s=1e-9, retry_s=0.0)


async def tick(controller: Controller, *, dispatches: bool = True) -> None:
    """One round of every loop."""
    await Poller(controller).round()
    await Requeuer(controller).round()
    if dispatches:
        await Dispatcher(controller).round()


def age(db: Database, seconds: float) -> None:
    """Have everything that was noted so far be that much older."""
    with db.write() as connection:
        connection.execute(sa.update(vms).values(last_seen=vms.c.last_seen - seconds))
        connection.execute(sa.update(jobs).values(changed_at=jobs.c.changed_at - seconds))


def state(db: Database, vm_id: int = 1) -> str:
    with db.read() as connection:
        return str(connection.scalar(sa.select(vms.c.state).where(vms.c.vm_id == vm_id)))


def test_jobs_beyond_the_gpus_are_pending_until_some_are_free(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 6)
    asyncio.run(tick(controller))
    assert [find_job(db, f"job-{n}")["state"] for n in range(1, 7)] == ["running"] * 4 + ["pending"] * 2
    assert len(list_jobs(db, ["pending"])) == count_jobs(db)["pending"] == 2
    machines[1].over = lambda _key: Ending("exit", 0)
    for _ in range(2):
        asyncio.run(tick(controller))
    assert {row_of(db, f"job-{n}")["status"] for n in range(1, 5)} == {"completed"}
    asyncio.run(tick(controller))
    assert count_jobs(db)["pending"] == 0
    assert {row_of(db, f"job-{n}")["status"] for n in range(1, 7)} == {"completed"}


def test_available_gpus_are_those_that_nobody_uses(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER, foreign={0})

    def available() -> int:
        asyncio.run(tick(controller))
        return int(list_vms(db)[0]["available_gpus"])

    assert available() == 3
    add_jobs(db, 2)
    assert [available(), available()] == [3, 1]  # the second look sees what the first one's end has claimed
    machines[1].foreign = set()
    assert available() == 2
    machines[1].over = lambda _key: Ending("exit", 0)
    assert available() == 4


def test_the_connection_to_a_vm_whose_row_changes_is_closed(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER)
    poller = Poller(controller)
    asyncio.run(poller.round())
    asyncio.run(poller.round())
    assert machines[1].num_closed == 0
    with db.write() as connection:
        connection.execute(sa.update(vms).values(python="/usr/bin/python3"))
    asyncio.run(poller.round())
    assert machines[1].num_closed == 1


def test_a_log_is_fetched_piece_by_piece_before_its_vm_may_drop_it(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 1)
    asyncio.run(tick(controller))
    (key,) = machines[1].specs
    machines[1].logs[key] = b"step 1 of 9, and more than one visit brings\n"
    machines[1].over = lambda _key: Ending("exit", 0)
    poller = Poller(controller)
    asyncio.run(poller.visit(vm_of(db, 1)))
    assert key in machines[1].specs
    asyncio.run(poller.round())
    assert controller.logs.path("job-1").read_bytes() == machines[1].logs[key]
    asyncio.run(poller.round())
    assert machines[1].specs == {}


def test_gpus_with_foreign_load_are_left_alone(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER, foreign={0, 2})
    add_jobs(db, 4)
    asyncio.run(tick(controller))
    assert sorted(spec["gpus"] for spec in machines[1].specs.values()) == [[1], [3]]


def test_foreign_load_that_appears_between_poll_and_start_is_seen_at_the_start(
    db: Database, make_controller: Make
) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 4)
    asyncio.run(tick(controller, dispatches=False))
    machines[1].foreign = {1}
    asyncio.run(Dispatcher(controller).round())
    assert sorted(spec["gpus"] for spec in machines[1].specs.values()) == [[0], [2], [3]]


def test_a_claim_whose_start_never_came_is_revoked_and_queued_uncounted(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 1)
    asyncio.run(tick(controller, dispatches=False))
    assert claim(db, Placement("job-1", 0, 1, (0,)))  # by a dispatcher that is killed here
    asyncio.run(tick(controller))
    assert row_of(db, "job-1")["status"] == JobState.RUNNING
    age(db, controller.settings.start_s + 1)
    asyncio.run(tick(controller))
    assert machines[1].revoked == {("job-1", 1)}
    assert machines[1].specs.keys() == {("job-1", 2)}
    assert (row_of(db, "job-1")["attempt"], row_of(db, "job-1")["retry_count"]) == (2, 0)


def test_a_vm_that_is_not_seen_turns_stale_then_lost_and_its_job_runs_elsewhere_counted(
    db: Database, make_controller: Make
) -> None:
    controller, machines = make_controller(count=2, settings=EAGER, num_gpus=1)
    add_jobs(db, 1)
    asyncio.run(tick(controller))
    (key,) = machines[1].specs
    machines[1].is_away = True
    asyncio.run(tick(controller))
    assert (state(db, 1), state(db, 2)) == (VmState.STALE, VmState.READY)
    age(db, controller.settings.lost_s - 60)
    asyncio.run(tick(controller))
    assert machines[2].specs == {}
    age(db, 70)
    asyncio.run(tick(controller))
    asyncio.run(tick(controller))
    assert state(db, 1) == VmState.LOST
    assert machines[2].specs.keys() == {("job-1", 2)}
    assert row_of(db, "job-1")["retry_count"] == 1
    machines[1].is_away = False  # it comes back, with the old attempt's result
    machines[1].ended[key] = Ending("exit", 0)
    asyncio.run(tick(controller))
    assert row_of(db, "job-1")["status"] == JobState.RUNNING
    assert state(db, 1) == VmState.READY


def test_a_job_whose_vm_was_deleted_says_so_and_runs_elsewhere_once_its_old_runner_is_over(
    db: Database, make_controller: Make
) -> None:
    controller, machines = make_controller(count=2, settings=EAGER, num_gpus=1)
    add_jobs(db, 1)
    asyncio.run(tick(controller))
    age(db, 86_400)  # it has run for a day
    old = row_of(db, "job-1")["vm_id"]
    with db.write() as connection:
        connection.execute(sa.delete(vms).where(vms.c.vm_id == old))
    asyncio.run(tick(controller))
    assert (row_of(db, "job-1")["status"], row_of(db, "job-1")["attempt"]) == (JobState.RUNNING, 1)
    assert "somebody deleted it" in row_of(db, "job-1")["failure_reason"]
    age(db, controller.settings.lost_s - 10)
    asyncio.run(tick(controller))
    assert row_of(db, "job-1")["attempt"] == 1
    age(db, 20)
    for _ in range(2):
        asyncio.run(tick(controller))
    assert machines[3 - old].specs.keys() == {("job-1", 2)}
    assert (row_of(db, "job-1")["retry_count"], row_of(db, "job-1")["failure_reason"]) == (1, "")


def test_a_visit_renews_and_starts_nothing_on_a_vm_whose_row_was_deleted_meanwhile(
    db: Database, make_controller: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 1)
    asyncio.run(tick(controller))

    vm, observe = vm_of(db, 1), machines[1].observe

    def observe_late(*_: Any) -> Observation:
        with db.write() as connection:
            connection.execute(sa.delete(vms))
        return observe()

    monkeypatch.setattr(machines[1], "observe", observe_late)
    asyncio.run(Poller(controller).round())
    assert machines[1].renewed == []
    with db.write() as connection:  # a claim that is to start there
        connection.execute(sa.update(jobs).values(attempt=2, started_at=None))
    asyncio.run(Dispatcher(controller).start(vm, [AttemptKey("job-1", 2)]))
    assert machines[1].specs.keys() == {("job-1", 1)}
    assert (row_of(db, "job-1")["status"], row_of(db, "job-1")["retry_count"]) == (JobState.QUEUED, 0)


def test_a_job_that_completed_while_all_controllers_were_away_is_completed(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 1)
    asyncio.run(tick(controller))
    machines[1].over = lambda _key: Ending("exit", 0)
    age(db, controller.settings.lost_s + 3600)
    asyncio.run(Requeuer(controller).round())  # it is the first to look
    assert (state(db), row_of(db, "job-1")["status"]) == (VmState.STALE, JobState.RUNNING)
    asyncio.run(tick(controller))
    assert (row_of(db, "job-1")["status"], row_of(db, "job-1")["retry_count"]) == (JobState.COMPLETED, 0)


def test_one_failed_visit_after_a_pause_of_all_controllers_loses_no_finished_job(
    db: Database, make_controller: Make
) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 1)
    asyncio.run(tick(controller))
    machines[1].over = lambda _key: Ending("exit", 0)
    pause_s = controller.settings.lost_s + 3600
    age(db, pause_s)
    with db.write() as connection:
        connection.execute(sa.update(vms).values(poll_at=vms.c.poll_at - pause_s))
    missed(db, 1, "the last visit before the pause failed")
    assert lose(db, controller.settings) == []
    machines[1].is_away = True
    asyncio.run(tick(controller))
    assert (state(db), row_of(db, "job-1")["status"]) == (VmState.STALE, JobState.RUNNING)
    machines[1].is_away = False
    asyncio.run(tick(controller))
    assert (row_of(db, "job-1")["status"], row_of(db, "job-1")["retry_count"]) == (JobState.COMPLETED, 0)


def test_leases_of_current_attempts_are_renewed_and_an_older_one_that_lives_is_ended(
    db: Database, make_controller: Make
) -> None:
    controller, machines = make_controller(settings=EAGER)
    add_jobs(db, 2)
    asyncio.run(tick(controller))
    with db.write() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.job_id == "job-1").values(attempt=9, vm_id=77))
    asyncio.run(Poller(controller).round())
    assert machines[1].renewed == [("job-2", 1)]
    assert machines[1].ended.keys() == {("job-1", 1)}


def test_a_vm_is_lost_no_sooner_than_its_runners_have_ended() -> None:
    assert FleetSettings(lease_s=50, end_s=20).lost_s >= 50 + 20 + 10


def test_a_job_that_is_cancelled_ends_on_its_vm(db: Database, make_controller: Make) -> None:
    controller, _ = make_controller(settings=EAGER)
    add_jobs(db, 1)
    asyncio.run(tick(controller))
    cancel(db, "job-1")
    for _ in range(2):
        asyncio.run(tick(controller))
    assert row_of(db, "job-1")["status"] == JobState.CANCELLED


def test_a_crash_is_tried_again_until_retries_are_used_up_with_the_reason(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=EAGER)
    machines[1].over = lambda _key: Ending("exit", 1, "CUDA out of memory")
    add_jobs(db, 1, max_retries=2)
    for _ in range(8):
        asyncio.run(tick(controller))
    row = row_of(db, "job-1")
    assert (row["status"], row["attempt"], row["retry_count"]) == (JobState.FAILED, 3, 2)
    assert (row["failure_reason"], row["exit_code"], row["retry_at"]) == ("CUDA out of memory", 1, None)


def test_a_retry_waits_for_its_back_off(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(settings=FleetSettings(poll_s=1e-9, retry_s=60.0))
    machines[1].over = lambda key: Ending("exit", 1) if key.attempt == 1 else None
    add_jobs(db, 1)
    for _ in range(3):
        asyncio.run(tick(controller))
    assert row_of(db, "job-1")["status"] == JobState.FAILED
    with db.write() as connection:
        connection.execute(sa.update(jobs).values(retry_at=jobs.c.retry_at - 61))
    asyncio.run(tick(controller))
    assert row_of(db, "job-1")["status"] == JobState.RUNNING


def test_a_row_that_says_nothing_to_run_fails_for_good_with_the_reason(db: Database, make_controller: Make) -> None:
    controller, _ = make_controller(settings=EAGER)
    add_jobs(db, 1, model="")
    asyncio.run(tick(controller))
    row = row_of(db, "job-1")
    assert (row["status"], row["exit_code"], row["retry_at"]) == (JobState.FAILED, 78, None)
    assert "neither a config nor a model" in row["failure_reason"]


def test_a_vm_that_cannot_be_reached_at_the_start_gives_the_job_to_another(db: Database, make_controller: Make) -> None:
    controller, machines = make_controller(count=2, settings=EAGER)
    asyncio.run(tick(controller, dispatches=False))
    add_jobs(db, 1)
    machines[1].is_away = True
    for _ in range(2):
        asyncio.run(Dispatcher(controller).round())
    assert machines[2].specs.keys() == {("job-1", 2)}
    assert row_of(db, "job-1")["retry_count"] == 0


def test_losing_a_vm_twice_counts_once(db: Database, make_controller: Make) -> None:
    controller, _ = make_controller(settings=EAGER)
    add_jobs(db, 1)
    asyncio.run(tick(controller))
    age(db, controller.settings.lost_s + 5)
    missed(db, 1, "gone")
    assert lose(db, EAGER) == [("job-1", 1)]
    assert lose(db, EAGER) == []
    assert row_of(db, "job-1")["retry_count"] == 1


@pytest.mark.parametrize(
    ("free", "wants", "gets"),
    [
        ({1: 4, 2: 2}, [(1, None), (1, None), (2, None)], [2, 2, 1]),  # the VM where the fewest are left
        ({1: 4, 2: 2}, [(1, 1), (4, 1), (3, None)], [1, None, 1]),
        ({1: 1, 2: 8}, [(8, None), (8, None), (1, 2)], [2, None, 1]),
        ({}, [(1, None)], [None]),
    ],
)
def test_jobs_are_placed_where_least_is_left_over_or_where_they_were(free: Any, wants: Any, gets: Any) -> None:
    places = FreeGpus((vm, index, 0, True) for vm, count in free.items() for index in range(count))
    taken = [places.take(count, preferred) for count, preferred in wants]
    assert [one and one[0] for one in taken] == gets
    every = [(one[0], index) for one in taken if one for index in one[1]]
    assert len(every) == len(set(every))
