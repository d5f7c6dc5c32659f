"""A link of a chain does what is decided, and keeps the record."""

from __future__ import annotations

import time

import pytest

from hpc_grpo.launch.place.job_queue import JobEnd
from hpc_grpo.run.attempt import AttemptRecord, ExitKind
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.lock import EndedJob
from hpc_grpo.run.paths import RunDir
from tests.support.links import CANCELLED, ended, link, saved, started, two_nodes_by_hand
from tests.support.places import FakeJob, FakeQueue


def test_a_link_writes_down_where_its_output_goes(run: RunDir, queue: FakeQueue) -> None:
    queue.jobs["7"].output = "/home/u/job-7.out"
    link(run, queue).start()
    assert [entry.output for entry in read_chain(run).links] == ["/home/u/job-7.out", ""]
    queue.is_silent = True
    link(run, queue).start()
    assert read_chain(run).links[0].output == "/home/u/job-7.out"


@pytest.mark.parametrize("kind", ["complete", "config", "stopped"])
def test_a_link_with_nothing_left_to_do_cancels_its_successor(run: RunDir, queue: FakeQueue, kind: ExitKind) -> None:
    started(run, queue).finish(ended(kind))
    assert queue.cancelled == ["100"]
    record = read_chain(run)
    assert (record.successor, record.ended) == ("", f"It ended as {kind}.")


@pytest.mark.parametrize("signalled", ["", "SIGTERM"])
def test_a_link_that_lost_a_node_keeps_its_successor_off_it(run: RunDir, queue: FakeQueue, signalled: str) -> None:
    """Signalled: the queue ended the job for the node."""
    started(run, queue).finish(ended("node_lost", {"nid002": "power"}, signalled))
    assert (queue.cancelled, len(queue.requests)) == ([], 1)
    assert queue.jobs["100"].excluded == ["nid002"]


def test_a_chain_is_over_although_its_successor_cannot_be_cancelled(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    queue.is_silent = True
    own.finish(ended("complete"))
    assert read_chain(run).ended == "It ended as complete."


def test_a_stop_written_while_the_link_starts_cancels_the_successor(run: RunDir, queue: FakeQueue) -> None:
    run.stop_marker.touch()
    link(run, queue).start()
    assert queue.cancelled == ["100"]


def test_a_link_whose_predecessor_the_user_cancelled_ends_the_chain(run: RunDir, queue: FakeQueue) -> None:
    link(run, queue).start()
    queue.ends["7"] = CANCELLED
    assert not link(run, queue, "100", "7").decide().goes_on
    assert "cancelled by the user" in read_chain(run).ended


def test_a_late_link_of_an_earlier_chain_leaves_the_users_new_chain_alone(run: RunDir, queue: FakeQueue) -> None:
    link(run, queue).start()
    # The user submits the run again as 50, which queues 101.
    write_chain(run, read_chain(run).with_link("50"))
    queue.jobs["50"] = FakeJob("50")
    link(run, queue, "50").start()
    assert read_chain(run).successor == "101"
    queue.ends["7"] = CANCELLED
    assert not link(run, queue, "100", "7").decide().goes_on
    record = read_chain(run)
    assert (record.successor, record.ended, queue.cancelled) == ("101", "", [])


def test_the_number_of_jobs_counts_from_the_users_own(run: RunDir, queue: FakeQueue) -> None:
    before = ""
    for job_id in ("7", "100", "101"):
        link(run, queue, job_id, before, max_job_chains=2).start()
        before = job_id
    assert queue.asked == ["submit 100 after 7", "submit 101 after 100"]
    again = link(run, queue, "60", max_job_chains=2)
    assert again.decide().goes_on
    again.start()
    assert read_chain(run).successor == "102"


def test_jobs_that_die_before_they_begin_end_the_chain_too(run: RunDir, queue: FakeQueue) -> None:
    write_chain(run, ChainRecord().with_link("1").with_link("2", "1").with_link("3", "2").with_link("4", "3"))
    decision = link(run, queue, "4", "3").decide()
    assert decision.gave_up
    assert "No new checkpoint in 3" in decision.why


@pytest.mark.parametrize(
    ("end", "before"),
    [
        (JobEnd("TIMEOUT", at_time_limit=True), EndedJob("7", is_gone=True)),
        (JobEnd("NODE_FAIL", lost_a_node=True), EndedJob("7", is_gone=False)),
        (JobEnd(), None),
    ],
)
def test_a_job_that_lost_a_node_may_still_live(
    run: RunDir, queue: FakeQueue, end: JobEnd, before: EndedJob | None
) -> None:
    queue.ends["7"] = end
    assert link(run, queue, "100", "7").before == before


def test_all_that_wait_are_cancelled_when_the_first_link_completes_the_run(run: RunDir, queue: FakeQueue) -> None:
    write_chain(run, ChainRecord().with_link("7").with_link("8", "7").with_link("9", "8"))
    started(run, queue, max_job_chains=2, jobs_can_submit=False).finish(ended("complete"))
    assert queue.asked == ["cancel 8 9"]
    assert read_chain(run).ended == "It ended as complete."


def test_a_chain_whose_node_hours_are_used_up_ends(run: RunDir, queue: FakeQueue) -> None:
    queue.jobs["7"].given = two_nodes_by_hand
    own = started(run, queue, by_hand=True, max_node_hours=2.0)
    attempt = AttemptRecord(1, "7", "slurm", ["nid001", "nid002"], time.time() - 3600, None, 1)
    attempt.end("resumable", 75, "Checkpointed.")
    own.finish(saved(run, attempt))
    assert queue.requests == []
    assert read_chain(run).ended.startswith("The jobs of this run have taken 2.0 of launch.slurm.max_node_hours = 2: ")
