"""Claims: a job has all of its GPUs or none, no GPU has two jobs, and only the newest attempt counts."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_grpo.fleet.claims import (
    Placement,
    cancel,
    claim,
    confirm,
    end_attempt,
    end_attempts,
    mark_started,
    queue_again,
)
from hpc_grpo.fleet.db import Database, attempts, gpus, jobs, metadata
from hpc_grpo.fleet.dispatch import claim_each, place_jobs
from hpc_grpo.fleet.jobs import find_job, job_attempts, list_vms
from hpc_grpo.fleet.messages import AttemptKey, GpuSeen, Orders
from hpc_grpo.fleet.observe import record
from hpc_grpo.fleet.poll import queue_due
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.states import Ending, JobState
from tests.support.simulated_vms import SimulatedVm, add_jobs, add_vms, row_of

SETTINGS = FleetSettings()
SHARE_MIB = 30_000
PATIENT = FleetSettings(retry_s=0.0, max_retries=1)


def see(db: Database, vm_id: int, vm: SimulatedVm) -> None:
    vm.obey(record(db, vm_id, vm.observe(), frozenset(), SETTINGS)[0])


def end(db: Database, key: AttemptKey, ending: Ending, fleet: FleetSettings = SETTINGS) -> object:
    with db.write() as connection:
        return end_attempt(connection, key, ending, fleet, db.now(connection))


def dispatch(db: Database) -> list[AttemptKey]:
    placements, _ = place_jobs(db)
    claimed = claim_each(db, placements)
    return [key for keys in claimed.values() for key in keys]


def owners(db: Database) -> dict[tuple[int, int], tuple[str, int] | None]:
    with db.read() as connection:
        rows = connection.execute(sa.select(gpus)).mappings()
        return {(r["vm_id"], r["gpu_index"]): (r["job_id"], r["attempt"]) if r["job_id"] else None for r in rows}


def claimed_on(db: Database, key: AttemptKey) -> str:
    return next(str(row["gpus"]) for row in job_attempts(db, key.job_id) if row["attempt"] == key.attempt)


def test_a_claim_takes_the_job_and_all_its_gpus(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 1, num_gpus=2)
    assert claim(db, Placement("job-1", 0, vm, (1, 3))) == ("job-1", 1)
    assert owners(db) == {(vm, 0): None, (vm, 1): ("job-1", 1), (vm, 2): None, (vm, 3): ("job-1", 1)}
    assert row_of(db, "job-1")["status"] == JobState.RUNNING


def test_a_claim_of_which_one_gpu_is_gone_changes_nothing(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 2, num_gpus=2)
    claim(db, Placement("job-1", 0, vm, (0, 1)))
    before = owners(db)
    assert claim(db, Placement("job-2", 0, vm, (1, 2))) is None
    assert owners(db) == before
    assert row_of(db, "job-2")["status"] == JobState.QUEUED
    assert row_of(db, "job-2")["attempt"] == 0


def test_a_job_is_claimed_once_by_whoever_read_it_as_it_is(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 1)
    assert claim(db, Placement("job-1", 0, vm, (0,)))
    assert claim(db, Placement("job-1", 0, vm, (1,))) is None
    assert claim(db, Placement("job-1", 1, vm, (1,))) is None


def test_gpus_of_a_vm_that_is_stale_drained_or_busy_are_not_claimed(db: Database) -> None:
    stale, drained, busy = add_vms(db, 3)
    for vm, machine in ((stale, SimulatedVm()), (drained, SimulatedVm()), (busy, SimulatedVm(foreign={0}))):
        see(db, vm, machine)
    with db.write() as connection:
        connection.execute(sa.text(f"UPDATE vms SET state = 'stale' WHERE vm_id = {stale}"))
        connection.execute(sa.text(f"UPDATE vms SET is_drained = 1 WHERE vm_id = {drained}"))
    add_jobs(db, 1)
    assert [claim(db, Placement("job-1", 0, vm, (0,))) for vm in (stale, drained, busy)] == [None, None, None]
    assert claim(db, Placement("job-1", 0, busy, (1,)))


def test_an_attempt_of_a_row_that_was_deleted_and_added_again_is_none_that_vms_have_had(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 1)
    first = claim(db, Placement("job-1", 0, vm, (0,)))
    assert first is not None
    end(db, first, Ending("exit", 0))
    with db.write() as connection:
        connection.execute(sa.delete(jobs))
    add_jobs(db, 1)
    assert claim(db, Placement("job-1", 0, vm, (0,))) == ("job-1", 2)
    assert row_of(db, "job-1")["attempt"] == 2


def test_attempts_of_another_fleet_are_left_alone_and_their_gpus_too(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    machine = SimulatedVm()
    alive, over = AttemptKey("theirs-1", 1), AttemptKey("theirs-2", 1)
    machine.specs = {alive: {"gpus": [2]}, over: {"gpus": [3]}}
    machine.ended = {over: Ending("exit", 0)}
    orders = record(db, vm, machine.observe(), frozenset({over}), SETTINGS)[0]
    assert orders == Orders()
    add_jobs(db, 1)
    assert claim(db, Placement("job-1", 0, vm, (2,))) is None


def test_a_machine_under_two_rows_keeps_the_attempt_of_the_other_row(db: Database) -> None:
    first, second = add_vms(db, 2)
    see(db, first, SimulatedVm())
    add_jobs(db, 1)
    key = claim(db, Placement("job-1", 0, first, (2,)))
    assert key is not None
    machine = SimulatedVm()
    machine.specs = {key: {"gpus": [2]}}
    assert record(db, second, machine.observe(), frozenset(), SETTINGS)[0].cancel == ()
    assert record(db, first, machine.observe(), frozenset(), SETTINGS)[0].renew == (key,)


def test_a_result_of_an_older_attempt_counts_for_nothing(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 1)
    first = claim(db, Placement("job-1", 0, vm, (0,)))
    assert first is not None
    end(db, first, Ending("lost"), PATIENT)
    queue_due(db)
    second = claim(db, Placement("job-1", 1, vm, (1,)))
    before = row_of(db, "job-1"), owners(db)
    assert end(db, first, Ending("exit", 0)) is None
    assert (row_of(db, "job-1"), owners(db)) == before
    assert second is not None
    end(db, second, Ending("exit", 0))
    assert row_of(db, "job-1")["status"] == JobState.COMPLETED


def test_a_terminal_state_and_the_release_of_its_gpus_are_one_transaction(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 1)
    key = claim(db, Placement("job-1", 0, vm, (0,)))
    assert key is not None
    try:
        with db.write() as connection:
            end_attempt(connection, key, Ending("exit", 0), SETTINGS, db.now(connection))
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert row_of(db, "job-1")["status"] == JobState.RUNNING
    assert owners(db)[vm, 0] == key
    end(db, key, Ending("exit", 0))
    assert owners(db)[vm, 0] is None


def test_foreign_load_that_came_after_the_claim_gives_it_back_uncounted(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 2)
    keys = [claim(db, Placement(f"job-{n}", 0, vm, (n,))) for n in (1, 2)]
    may_start = confirm(db, vm, [key for key in keys if key], SimulatedVm(foreign={1}).observe().gpus, SETTINGS)
    assert list(may_start) == [("job-2", 1)]
    row = row_of(db, "job-1")
    assert (row["status"], row["retry_count"]) == (JobState.QUEUED, 0)
    assert claim(db, Placement("job-1", 1, vm, (1,))) is None


def test_a_claim_too_old_to_start_before_it_may_be_revoked_is_given_back(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 1)
    key = claim(db, Placement("job-1", 0, vm, (0,)))
    with db.write() as connection:
        late = SETTINGS.start_s - 5
        connection.execute(sa.update(jobs).values(changed_at=jobs.c.changed_at - late))
    assert key is not None
    assert confirm(db, vm, [key], [], SETTINGS) == {}
    assert row_of(db, "job-1")["status"] == JobState.QUEUED


def test_cancelling_a_job_that_waits_is_done_at_once_and_one_that_runs_by_its_vm(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm())
    add_jobs(db, 2)
    key = claim(db, Placement("job-1", 0, vm, (0,)))
    assert cancel(db, "job-2") == JobState.CANCELLED
    assert cancel(db, "job-1") == JobState.RUNNING
    assert key is not None
    end(db, key, Ending("exit", 75, step=3))
    assert row_of(db, "job-1")["status"] == JobState.CANCELLED
    assert queue_again(db, "job-1") == JobState.CANCELLED
    row = row_of(db, "job-1")
    assert (row["status"], row["is_cancelled"]) == (JobState.QUEUED, 0)


def test_ten_threads_that_claim_the_same_gpus_get_each_of_them_once(db: Database) -> None:
    for vm in add_vms(db, 2):
        see(db, vm, SimulatedVm())
    add_jobs(db, 30)
    got: list[AttemptKey] = []
    threads = [threading.Thread(target=lambda: got.extend(dispatch(db))) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [owner for owner in owners(db).values() if owner]
    assert len(got) == len(set(got)) == len(held) == 8
    assert set(held) == set(got)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["dispatch", "end", "old", "back", "cancel", "again", "due"]), st.integers(0, 5)),
    max_size=30,
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS, st.lists(st.integers(1, 3), min_size=2, max_size=6))
def test_whatever_happens_gpus_and_attempts_and_jobs_agree(
    tmp_path: Path, operations: list[tuple[str, int]], needs: list[int]
) -> None:
    """A running job holds as many GPUs as it asked for, of one VM; no other job holds any; the record says the same.

    Jobs of odd numbers share GPUs: what is claimed of a GPU is what its jobs declared, and none has it alone.
    """
    db = Database(f"sqlite:///{tmp_path / 'fleet.db'}")
    with db.write() as connection:
        metadata.drop_all(connection)
    db.create_tables()
    for vm in add_vms(db, 2):
        see(db, vm, SimulatedVm(num_gpus=3))
    with db.write() as connection:
        rows = [
            {"job_id": f"job-{n}", "model": "m", "num_gpus": need, "gpu_memory_mib": SHARE_MIB * (n % 2)}
            for n, need in enumerate(needs)
        ]
        connection.execute(sa.insert(jobs), rows)
    for name, number in operations:
        job_id = f"job-{number % len(needs)}"
        newest = AttemptKey(job_id, row_of(db, job_id)["attempt"])
        if name == "dispatch":
            dispatch(db)
        elif name == "end":
            end(db, newest, Ending("exit", (0, 1, 75, 78, -9, None)[number]), PATIENT)
        elif name == "old":
            end(db, AttemptKey(job_id, newest.attempt - 1), Ending("exit", 0))
        elif name == "back":
            end_attempts(db, [newest], Ending("not_started", why="not reached"), SETTINGS)
        elif name == "cancel":
            cancel(db, job_id)
        elif name == "again":
            queue_again(db, job_id)
        else:
            queue_due(db)
        check(db, needs)
    db.close()


def check(db: Database, needs: list[int]) -> None:
    held: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for gpu, owner in owners(db).items():
        if owner:
            held.setdefault(owner, []).append(gpu)
    with db.read() as connection:
        rows = connection.execute(sa.select(jobs)).mappings().all()
        records = connection.execute(sa.select(attempts)).mappings().all()
        on_gpus = connection.execute(sa.select(gpus)).mappings().all()
    shared = [
        (row["vm_id"], index)
        for row in records
        if row["gpu_memory_mib"] and row["ended_at"] is None
        for index in json.loads(row["gpus"])
    ]
    for gpu in on_gpus:
        assert gpu["claimed_mib"] == SHARE_MIB * shared.count((gpu["vm_id"], gpu["gpu_index"])) <= gpu["memory_mib"]
        assert not (gpu["claimed_mib"] and gpu["job_id"])
    alone = {row["job_id"] for row in rows if not row["gpu_memory_mib"]}
    rows = [row for row in rows if row["job_id"] in alone]
    records = [record for record in records if record["job_id"] in alone]
    running = {(row["job_id"], row["attempt"]) for row in rows if row["status"] == JobState.RUNNING}
    assert held.keys() == running
    for (job_id, attempt), its in held.items():
        assert len(its) == needs[int(job_id.removeprefix("job-"))]
        (entry,) = [one for one in records if (one["job_id"], one["attempt"]) == (job_id, attempt)]
        assert {entry["vm_id"]} == {vm for vm, _ in its}
        assert json.loads(entry["gpus"]) == sorted(index for _, index in its)
    assert {(one["job_id"], one["attempt"]) for one in records if one["ended_at"] is None} == running


def test_jobs_share_a_gpu_by_the_memory_that_they_declare(db: Database) -> None:
    """A third one that has no room there, and one that wants a GPU alone, have other GPUs."""
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm(num_gpus=2))
    add_jobs(db, 4, gpu_memory_mib=40_000)
    with db.write() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.job_id == "job-4").values(gpu_memory_mib=0))
    first, second, third = dispatch(db)
    assert [claimed_on(db, key) for key in (first, second, third)] == ["[0]", "[0]", "[1]"]
    assert dispatch(db) == []
    assert find_job(db, "job-4")["state"] == JobState.PENDING
    for key in (first, second):
        end(db, key, Ending("exit", 0))
        end(db, key, Ending("exit", 0))  # by another controller, to which nothing is left to free
    assert [claimed_on(db, key) for key in dispatch(db)] == ["[0]"]
    assert list_vms(db)[0]["claimed"] == 2


def test_what_a_job_on_a_shared_gpu_uses_is_foreign_beyond_its_claim_alone(db: Database) -> None:
    (vm,) = add_vms(db, 1)
    see(db, vm, SimulatedVm(num_gpus=1))
    add_jobs(db, 3, gpu_memory_mib=20_000)
    old, *_ = dispatch(db)
    loaded = GpuSeen(0, "GPU-0", 81_559, 30_000, 1)
    with db.write() as connection:
        mark_started(connection, old, 0.0)
    new = [AttemptKey(f"job-{n}", 1) for n in (2, 3)]
    assert list(confirm(db, vm, new[:1], [loaded], SETTINGS)) == new[:1]
    assert confirm(db, vm, new[1:], [replace(loaded, used_mib=50_000)], SETTINGS) == {}
