"""The user's command hears once what has become of the run, and its failures cost nothing."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpc_grpo.launch.chain.decide import News
from hpc_grpo.launch.chain.link import notify
from hpc_grpo.launch.place.job_queue import JobEnd
from hpc_grpo.run.chain import read_chain, write_chain
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from tests.support.links import CANCELLED, ended, link, saved, started, told
from tests.support.places import FakeQueue


def test_the_command_runs_where_the_run_was_started_and_learns_what_happened(run: RunDir, tmp_path: Path) -> None:
    line = 'echo "$1: $HPC_GRPO_EVENT $HPC_GRPO_RUN $HPC_GRPO_WHY" > told'
    notify(["sh", "-c", line, "sh", "me"], run, News("retrying", "Lost 1 node(s)."))
    assert (tmp_path / "told").read_text() == f"me: retrying {run.path} Lost 1 node(s).\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/nowhere/tell"], "no /nowhere/tell on PATH"),
        (["~nobody-of-that-name/tell"], "home directory"),
        (["sh", "-c", "echo full >&2; exit 3"], "could not tell that the run is ended: sh ended with 3: full"),
        (["sleep", "60"], "sleep gave no answer within 0 s"),
    ],
)
def test_a_command_that_fails_is_reported_and_costs_nothing(
    command: list[str], expected: str, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    notify(command, run, News("ended", "why"), deadline_s=0.2)
    assert expected in capsys.readouterr().out


def test_the_user_hears_of_a_crash_once_and_when_the_run_is_no_longer_held(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    own.finish(ended("crash"))
    assert told(run) == []
    own.tell()
    own.tell()
    assert told(run) == ["retrying: It ended as crash."]


def test_the_user_hears_that_no_job_is_left(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue, max_job_chains=0)
    own.finish(ended("resumable"))
    own.tell()
    assert told(run) == ["ended: It ended as resumable."]


def test_the_user_hears_once_that_the_run_is_complete(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    run.complete_marker.touch()
    own.finish(ended("complete", signalled="SIGTERM"))
    own.tell()
    successor = link(run, queue, "100", successor_of="7")
    assert not successor.decide().goes_on
    successor.tell()
    assert told(run) == ["complete: It ended as complete."]


def test_the_successor_tells_who_cancelled_a_job(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    own.finish(ended("cancelled", signalled="SIGTERM"))
    own.tell()
    assert told(run) == []
    queue.ends["7"] = CANCELLED
    successor = link(run, queue, "100", successor_of="7")
    assert not successor.decide().goes_on
    successor.tell()
    assert told(run) == ["ended: Job 7 was cancelled by the user; hpc-grpo resume takes it up again."]


def test_the_user_hears_of_a_crash_where_the_queue_does_not_answer(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    queue.is_silent = True
    own.finish(ended("crash"))
    own.tell()
    assert told(run) == ["retrying: It ended as crash."]


def test_the_successor_tells_of_a_job_that_was_killed_before_it_gave_the_run_up(run: RunDir, queue: FakeQueue) -> None:
    started(run, queue)
    saved(run, ended("node_lost"))
    write_json_atomic(run.holder, asdict(LockOwner("nid001", 1, 1, "7", 1, beat_at=5.0)))
    queue.ends["7"] = JobEnd("NODE_FAIL", lost_a_node=True)
    successor = link(run, queue, "100", successor_of="7")
    assert successor.decide().goes_on
    successor.tell()
    assert told(run) == ["retrying: Job 7 ended as node_lost; carrying on."]


def test_the_successor_tells_of_a_job_that_was_killed_without_a_record(run: RunDir, queue: FakeQueue) -> None:
    started(run, queue)
    queue.ends["7"] = JobEnd("OUT_OF_MEMORY")
    successor = link(run, queue, "100", successor_of="7")
    assert successor.decide().goes_on
    successor.tell()
    assert told(run) == ["retrying: Job 7 ended without a word (OUT_OF_MEMORY); carrying on."]


def test_a_job_submitted_again_that_cannot_go_on_is_news(run: RunDir, queue: FakeQueue) -> None:
    write_chain(run, replace(read_chain(run).with_link("6"), ended="Gave up."))
    run.stop_marker.touch()
    own = link(run, queue)
    assert not own.decide().goes_on
    own.tell()
    assert told(run) == ["ended: The STOP file asks the run to end; hpc-grpo resume takes it up again."]
