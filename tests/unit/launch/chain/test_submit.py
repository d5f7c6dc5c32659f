"""Submitting and cancelling a run from outside: what the queue is asked, in which order, and what is recorded."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.submit import (
    attempt_command,
    cancel_run,
    submit_run,
)
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import start_time
from tests.support.places import FakeQueue


def launch(jobs_can_submit: bool, max_job_chains: int | None, max_node_hours: float | None = None) -> LaunchConfig:
    slurm = {"jobs_can_submit": jobs_can_submit, "max_job_chains": max_job_chains, "max_node_hours": max_node_hours}
    return LaunchConfig.model_validate({"slurm": slurm})


def minutes(queue: FakeQueue) -> list[int]:
    return [request.launch.slurm.time_min for request in queue.requests]


def recorded(run: RunDir) -> list[tuple[str, str]]:
    return [(link.job_id, link.successor_of) for link in read_chain(run).links]


def test_one_job_is_submitted_where_none_may_follow(run: RunDir, queue: FakeQueue) -> None:
    assert submit_run(run, launch(True, 0), "driver.py", queue) == "100"
    assert queue.asked == ["submit 100"]
    assert queue.requests[0].command == f"attempt {run.path} --driver driver.py"
    assert recorded(run) == [("100", "")]


def test_two_jobs_wait_already_for_the_first_one_which_may_die_before_it_can_queue_any(
    run: RunDir, queue: FakeQueue
) -> None:
    submit_run(run, launch(True, None), "driver.py", queue)
    assert queue.asked == ["submit 100 held", "submit 101 after 100", "submit 102 after 100 101", "release 100"]
    assert recorded(run) == [("100", ""), ("101", "100"), ("102", "101")]


def test_where_the_queue_takes_one_job_alone_that_one_stays(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    queue = FakeQueue(refused=2)
    assert submit_run(run, launch(True, None), "driver.py", queue) == "100"
    assert queue.asked == ["submit 100 held", "release 100"]
    assert recorded(run) == [("100", "")]
    said = capsys.readouterr().err
    assert "Until job 100 runs and queues one, no job waits behind job 100: The queue refused" in said


def test_a_first_job_that_the_queue_does_not_let_go_is_named(
    run: RunDir, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def release(_queue: FakeQueue, job_id: str) -> None:
        raise LaunchError(f"scontrol release {job_id} failed: timed out")

    monkeypatch.setattr(FakeQueue, "release", release)
    with pytest.raises(LaunchError, match=r"scontrol release 100 failed.*\nJob 100 is submitted and stays held"):
        submit_run(run, launch(True, None), "driver.py", queue)
    assert recorded(run) == [("100", ""), ("101", "100"), ("102", "101")]


def test_the_first_job_may_wait_for_another_one(run: RunDir, queue: FakeQueue) -> None:
    submit_run(run, launch(True, None), "driver.py", queue, after="41")
    assert queue.asked == [
        "submit 100 after 41 held",
        "submit 101 after 100",
        "submit 102 after 100 101",
        "release 100",
    ]


def test_a_job_is_told_what_queued_it_and_a_driver_that_is_not_the_default(run: RunDir) -> None:
    assert attempt_command(run) == f"attempt {run.path}"
    assert attempt_command(run, "my.py", "7") == f"attempt {run.path} --successor-of 7 --driver my.py"


def test_a_walltime_that_the_ceiling_cuts_short_is_not_recorded_for_the_next(run: RunDir, queue: FakeQueue) -> None:
    """The job may also be cancelled before it starts."""
    asked = launch(True, None, max_node_hours=0.5)
    submit_run(run, asked, "driver", queue)
    assert (minutes(queue), asked.slurm.time_min) == ([30], 60)
    assert read_chain(run).launch(launch(True, None)).slurm.time_min == 60


def test_a_stop_of_before_is_removed_unless_the_run_is_refused(
    run: RunDir, queue: FakeQueue, capsys: pytest.CaptureFixture[str]
) -> None:
    run.stop_marker.touch()
    with pytest.raises(ConfigError, match="max_node_hours"):
        submit_run(run, launch(True, None, max_node_hours=0.001), "driver", queue)
    assert (run.stop_marker.exists(), queue.asked) == (True, [])
    submit_run(run, launch(True, None), "driver", queue)
    assert not run.stop_marker.exists()
    assert "Removed STOP" in capsys.readouterr().err


def test_where_jobs_cannot_submit_all_are_queued_before_the_first_may_start(run: RunDir, queue: FakeQueue) -> None:
    submit_run(run, launch(False, 2), "driver", queue)
    assert queue.asked == ["submit 100 held", "submit 101 after 100", "submit 102 after 100 101", "release 100"]
    assert recorded(run) == [("100", ""), ("101", "100"), ("102", "101")]


def test_submitting_again_cancels_what_waits_of_before(run: RunDir, queue: FakeQueue) -> None:
    submit_run(run, launch(False, 1), "driver", queue)
    again = FakeQueue()
    submit_run(run, launch(True, 0), "driver", again)
    assert again.asked[0] == "cancel 100 101"


def test_a_follow_on_job_that_is_refused_leaves_nothing_behind(run: RunDir) -> None:
    queue = FakeQueue(refused=3)
    with pytest.raises(LaunchError, match=r"too many jobs\. It was follow-on job 2; those before it were cancelled"):
        submit_run(run, launch(False, 5), "driver", queue)
    assert queue.asked[-1] == "cancel 100 101"
    assert read_chain(run).links == ()


def test_jobs_that_are_queued_at_once_share_the_node_hours(run: RunDir, queue: FakeQueue) -> None:
    submit_run(run, launch(False, 9, max_node_hours=2.5), "driver", queue)
    assert minutes(queue) == [60, 60, 30]


@dataclass
class WatchfulQueue(FakeQueue):
    """Cancels only where the STOP file of `run` keeps a link from starting meanwhile."""

    run: RunDir | None = field(default=None)

    def cancel(self, job_ids: Sequence[str]) -> None:
        assert self.run is not None
        assert self.run.stop_marker.exists(), "a link that starts now would train"
        super().cancel(job_ids)


def test_cancelling_a_chain_ends_its_jobs_and_its_record(run: RunDir) -> None:
    queue = WatchfulQueue(run=run)
    write_chain(run, ChainRecord(successor="8").with_link("7").with_link("8", "7"))
    for _ in range(2):  # a second time does no harm
        assert list(cancel_run(run, queue)) == ["Cancelled what is left of 2 jobs: 7, 8."]
    assert queue.cancelled == ["8", "7"] * 2
    record = read_chain(run)
    assert (record.successor, record.ended) == ("", "Cancelled by hpc-grpo stop --now.")
    assert [link.job_id for link in record.links] == ["7", "8"]


def test_cancelling_a_chain_that_gave_up_keeps_why_it_did(run: RunDir, queue: FakeQueue) -> None:
    write_chain(run, ChainRecord(ended="No new checkpoint in 3 attempts.").with_link("7"))
    list(cancel_run(run, queue))
    assert read_chain(run).ended == "No new checkpoint in 3 attempts."


def test_cancelling_a_run_that_nothing_trains_asks_the_queue_nothing(run: RunDir, queue: FakeQueue) -> None:
    assert list(cancel_run(run, queue)) == ["Nothing of the run is waiting or running."]
    assert (queue.asked, run.chain.exists(), run.stop_marker.exists()) == ([], False, True)


def own_by(run: RunDir, host: str, pid: int, **changed: Any) -> None:
    owner = LockOwner(host, pid, start_time(pid) or 1, "local1", 1, 0.0)
    write_json_atomic(run.holder, {**asdict(owner), **changed})


_COUNTS_TERM = """
import signal, sys
seen = 0
def count(*_):
    global seen
    seen += 1
    if seen == 2:
        sys.exit(42)
signal.signal(signal.SIGTERM, count)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_a_process_on_this_machine_is_told_twice(run: RunDir, queue: FakeQueue) -> None:
    """The second signal does not wait for a checkpoint."""
    with subprocess.Popen([sys.executable, "-c", _COUNTS_TERM], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        own_by(run, socket.gethostname(), process.pid)
        assert list(cancel_run(run, queue)) == [f"Told process {process.pid} to end."]
        assert process.wait(30) == 42


def test_a_process_that_is_gone_is_not_signalled(run: RunDir, queue: FakeQueue) -> None:
    own_by(run, socket.gethostname(), os.getpid(), pid_started=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: pytest.fail(f"sent {signal.Signals(number).name}"))
        assert list(cancel_run(run, queue)) == [f"Process {os.getpid()} is gone already."]


def test_a_process_elsewhere_finds_the_stop(run: RunDir, queue: FakeQueue) -> None:
    own_by(run, "nid007", 1)
    expected = ["It was started by hand on nid007: the STOP file ends it there after its step."]
    assert list(cancel_run(run, queue)) == expected
