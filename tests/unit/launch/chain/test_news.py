"""What a link of a chain has the user's command tell, and when."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from hpc_grpo.run.attempt import ExitKind
from hpc_grpo.run.chain import read_chain, write_chain
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from tests.unit.launch.chain.chain_scene import CANCELLED, FakeSlurm, ended, link


@pytest.mark.parametrize(
    ("kind", "max_job_chains", "expected"),
    [
        ("crash", None, [("retrying", "It ended as crash.")]),
        ("crash", 0, [("ended", "It ended as crash.")]),
        ("resumable", None, []),
        ("resumable", 0, [("ended", "It ended as resumable.")]),
        ("config", None, [("ended", "It ended as config.")]),
    ],
)
def test_the_user_is_told_what_is_news(
    run: RunDir, fake: FakeSlurm, kind: ExitKind, max_job_chains: int | None, expected: list[tuple[str, str]]
) -> None:
    own = link(run, "7", max_job_chains=max_job_chains)
    own.start()
    own.finish(ended(kind))
    assert fake.notified == []  # the run is still held
    own.tell()
    own.tell()
    assert fake.notified == expected


def test_the_user_is_told_once_that_the_run_is_complete(run: RunDir, fake: FakeSlurm) -> None:
    own = link(run, "7")
    own.start()
    run.complete_marker.touch()
    own.finish(ended("complete", signalled="SIGTERM"))
    own.tell()
    successor = link(run, "100", successor_of="7")
    assert not successor.decide().goes_on
    successor.tell()
    assert fake.notified == [("complete", "It ended as complete.")]


def test_of_a_job_that_somebody_ended_the_successor_tells(run: RunDir, fake: FakeSlurm) -> None:
    own = link(run, "7")
    own.start()
    own.finish(ended("cancelled", signalled="SIGTERM"))
    own.tell()
    assert fake.notified == []
    fake.final["7"] = CANCELLED
    successor = link(run, "100", successor_of="7")
    assert not successor.decide().goes_on
    successor.tell()
    ((event, why),) = fake.notified
    assert (event, "cancelled by the user" in why) == ("ended", True)


def test_a_failure_is_told_where_slurm_does_not_answer(run: RunDir, fake: FakeSlurm) -> None:
    own = link(run, "7")
    own.start()
    fake.is_silent = True
    own.finish(ended("crash"))
    own.tell()
    assert fake.notified == [("retrying", "It ended as crash.")]


def test_one_that_was_killed_over_its_teardown_could_not_tell(run: RunDir, fake: FakeSlurm) -> None:
    link(run, "7").start()
    folder = run.attempt(1, "7")
    folder.mkdir(parents=True)
    ended("node_lost").save(folder)
    write_json_atomic(run.holder, asdict(LockOwner("nid001", 1, 1, "7", 1, beat_at=5.0)))
    fake.final["7"] = "NODE_FAIL"
    successor = link(run, "100", successor_of="7")
    assert successor.decide().goes_on
    successor.tell()
    assert fake.notified == [("retrying", "Job 7 ended as node_lost; carrying on.")]


@pytest.mark.parametrize(("state", "is_told"), [("OUT_OF_MEMORY", True), ("TIMEOUT", False)])
def test_of_a_job_that_was_killed_the_successor_tells(run: RunDir, fake: FakeSlurm, state: str, is_told: bool) -> None:
    link(run, "7").start()
    fake.final["7"] = state
    successor = link(run, "100", successor_of="7")
    assert successor.decide().goes_on
    successor.tell()
    expected = ("retrying", "Job 7 ended without a word (OUT_OF_MEMORY); carrying on.")
    assert fake.notified == ([expected] if is_told else [])


def test_a_job_handed_in_again_that_cannot_go_on_is_news(run: RunDir, fake: FakeSlurm) -> None:
    write_chain(run, replace(read_chain(run).with_link("6"), ended="Gave up."))
    run.stop_marker.touch()
    own = link(run, "7")
    assert not own.decide().goes_on
    own.tell()
    assert [event for event, _ in fake.notified] == ["ended"]
