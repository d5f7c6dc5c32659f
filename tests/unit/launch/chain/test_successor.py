"""The job that a link queues behind itself: when, and what it asks for."""

from __future__ import annotations

import time

from hpc_grpo.launch.chain.link import ChainLink, LinkJob, LinkOrigin
from hpc_grpo.launch.place.job_queue import JobEnd
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.paths import RunDir
from tests.support.links import Clock, ended, launch, link, saved, started, two_nodes_by_hand
from tests.support.places import FakeJob, FakeQueue


def test_a_link_queues_its_successor_once_with_what_the_user_gave_by_hand(run: RunDir, queue: FakeQueue) -> None:
    queue.jobs["7"].given = two_nodes_by_hand
    started(run, queue, by_hand=True)
    assert queue.asked == ["submit 100 after 7", "submit 101 after 7 100"]
    request, _ = queue.requests
    assert request.command == f"attempt {run.path} --successor-of 7"
    slurm = request.launch.slurm
    assert (request.launch.num_nodes, slurm.partition, slurm.max_job_chains) == (2, "workq", None)
    record = read_chain(run)
    assert [(entry.job_id, entry.successor_of) for entry in record.links] == [("7", ""), ("100", "7"), ("101", "100")]
    assert (record.successor, record.ended) == ("100", "")
    started(run, queue)
    assert len(queue.requests) == 2


def asked(queue: FakeQueue) -> list[tuple[int, str | None]]:
    return [(request.launch.num_nodes, request.launch.slurm.partition) for request in queue.requests]


def test_what_was_given_by_hand_goes_on_from_link_to_link(run: RunDir, queue: FakeQueue) -> None:
    queue.jobs["7"].given = two_nodes_by_hand
    started(run, queue, by_hand=True)
    started(run, queue, "100", "7")
    assert asked(queue) == [(2, "workq")] * 3


def test_a_job_by_hand_asks_the_config_again_and_not_for_what_was_noted_before(run: RunDir, queue: FakeQueue) -> None:
    write_chain(run, ChainRecord().asking_for(two_nodes_by_hand(launch())))
    started(run, queue, by_hand=True)
    assert asked(queue) == [(1, None)] * 2


def test_a_successor_that_is_gone_is_queued_anew(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    queue.jobs["100"].is_over = True
    own.finish(ended("resumable"))
    assert queue.asked[2:] == ["cancel 100 101", "submit 102 after 7", "submit 103 after 7 102"]
    assert read_chain(run).successor == "102"
    assert [entry.job_id for entry in read_chain(run).links] == ["7", "102", "103"]


def test_a_link_that_was_told_to_end_queues_nothing(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    queue.jobs["100"].is_over = True
    own.finish(ended("resumable", signalled="SIGTERM"))
    assert len(queue.requests) == 2


def test_a_queue_that_does_not_answer_costs_the_attempt_nothing(run: RunDir, queue: FakeQueue) -> None:
    queue.is_silent = True
    own = started(run, queue)
    own.finish(ended("resumable"))
    assert read_chain(run).successor == ""
    queue.is_silent = False
    own.finish(ended("resumable"))
    assert read_chain(run).successor == "100"


def test_a_refused_successor_is_queued_some_minutes_later(run: RunDir, queue: FakeQueue) -> None:
    clock = Clock()
    queue.is_silent = True
    own = ChainLink(run, launch(), queue, LinkJob("7", "hpc_grpo.driver.main"), clock)
    own.have_two_wait()
    own.start()
    queue.is_silent = False
    own.try_again()
    assert queue.requests == []
    clock.now += 300.0
    own.try_again()
    own.try_again()
    assert (len(queue.requests), queue.hurried) == (2, 1)
    assert read_chain(run).successor == "100"


def test_what_was_given_by_hand_is_asked_again_some_minutes_later(run: RunDir, queue: FakeQueue) -> None:
    clock = Clock()
    queue.jobs["7"].given, queue.is_silent = two_nodes_by_hand, True
    own = ChainLink(run, launch(), queue, LinkJob("7", "hpc_grpo.driver.main", LinkOrigin(by_hand=True)), clock)
    own.have_two_wait()
    queue.is_silent = False
    own.start()
    clock.now += 300.0
    own.try_again()
    assert asked(queue) == [(2, "workq")] * 2
    assert read_chain(run).launch(launch()).num_nodes == 2


def test_where_jobs_cannot_submit_each_link_takes_the_one_queued_behind_it(run: RunDir, queue: FakeQueue) -> None:
    """Three jobs were queued at once; the first is interrupted, the second completes the run."""
    write_chain(run, ChainRecord().with_link("7").with_link("8", "7").with_link("9", "8"))
    queue.jobs |= {"8": FakeJob("8"), "9": FakeJob("9")}
    first = started(run, queue, max_job_chains=2, jobs_can_submit=False)
    assert read_chain(run).successor == "8"
    first.finish(ended("resumable"))
    assert queue.asked == []
    queue.ends["7"] = JobEnd("TIMEOUT", at_time_limit=True)
    second = link(run, queue, "8", "7", max_job_chains=2, jobs_can_submit=False)
    assert second.decide().goes_on
    second.start()
    assert read_chain(run).successor == "9"
    second.finish(ended("complete"))
    assert queue.asked == ["cancel 9"]
    assert (read_chain(run).successor, read_chain(run).ended) == ("", "It ended as complete.")


def test_a_successor_asks_for_what_is_left_of_the_node_hours(run: RunDir, queue: FakeQueue) -> None:
    """Of 3 node-hours this job of 2 nodes may take 2, so 30 minutes of 2 nodes are left."""
    queue.jobs["7"].given = two_nodes_by_hand
    started(run, queue, by_hand=True, max_node_hours=3.0)
    assert [request.launch.slurm.time_min for request in queue.requests] == [30]


def test_a_job_that_crashes_early_leaves_its_hours_to_the_next(run: RunDir, queue: FakeQueue) -> None:
    queue.jobs["7"].given = two_nodes_by_hand
    own = started(run, queue, by_hand=True, max_node_hours=2.0)
    attempt = AttemptRecord(1, "7", "slurm", ["nid001", "nid002"], time.time() - 350, None, 1)
    attempt.end("crash", 1, "A bug.")
    own.finish(saved(run, attempt))
    assert [request.launch.slurm.time_min for request in queue.requests] == [54]


def test_a_walltime_that_the_ceiling_cut_short_is_not_handed_on(run: RunDir, queue: FakeQueue) -> None:
    """The job before took 1 of 3 node-hours at most and crashed at once; this one was queued with 30 minutes."""

    queue.jobs["7"].given, queue.jobs["7"].node_hours = two_nodes_by_hand, 1.0
    started(run, queue, by_hand=True, max_node_hours=4.0)
    assert [request.launch.slurm.time_min for request in queue.requests] == [60, 30]


def test_how_a_chain_goes_on_is_as_the_config_says_now(run: RunDir, queue: FakeQueue) -> None:
    queue.jobs["7"].given = two_nodes_by_hand
    started(run, queue, by_hand=True, max_node_hours=4.0)
    next_one = read_chain(run).launch(launch(max_job_chains=3, max_node_hours=9.0))
    assert (next_one.slurm.max_node_hours, next_one.slurm.max_job_chains, next_one.num_nodes) == (9.0, 3, 2)
