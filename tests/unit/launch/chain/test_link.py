"""A link of a chain does what is decided, and keeps the record."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpc_grpo.launch.chain import link as link_module
from hpc_grpo.launch.chain.link import ChainLink, LinkJob
from hpc_grpo.launch.chain.submit import submit_run
from hpc_grpo.launch.place.job_queue import JobEnd, JobRequest
from hpc_grpo.run.attempt import AttemptRecord, ExitKind
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.lock import EndedJob
from hpc_grpo.run.paths import RunDir
from tests.support.links import CANCELLED, Clock, ended, launch, link, saved, started, two_nodes_by_hand
from tests.support.places import FakeJob, FakeQueue


@dataclass
class StoppingQueue(FakeQueue):
    """A queue at whose first job the user asks the run to end: `stop` is made."""

    stop: Path = Path()

    def submit(self, request: JobRequest) -> str:
        self.stop.touch()
        return super().submit(request)


def test_a_link_writes_down_where_its_output_goes(run: RunDir, queue: FakeQueue) -> None:
    queue.jobs["7"].output = "/home/u/job-7.out"
    started(run, queue)
    assert [entry.output for entry in read_chain(run).links] == ["/home/u/job-7.out", "", ""]
    queue.is_silent = True
    started(run, queue)
    assert read_chain(run).links[0].output == "/home/u/job-7.out"


@pytest.mark.parametrize("kind", ["complete", "config", "stopped"])
def test_a_link_with_nothing_left_to_do_cancels_its_successor(run: RunDir, queue: FakeQueue, kind: ExitKind) -> None:
    started(run, queue).finish(ended(kind))
    assert queue.cancelled == ["100", "101"]
    record = read_chain(run)
    assert (record.successor, record.ended) == ("", f"It ended as {kind}.")


@pytest.mark.parametrize("signalled", ["", "SIGTERM"])
def test_a_link_that_lost_a_node_keeps_its_successor_off_it(run: RunDir, queue: FakeQueue, signalled: str) -> None:
    """Signalled: the queue ended the job for the node."""
    started(run, queue).finish(ended("node_lost", {"nid002": "power"}, signalled))
    assert (queue.cancelled, len(queue.requests)) == ([], 2)
    assert [queue.jobs[job_id].excluded for job_id in ("100", "101")] == [["nid002"], ["nid002"]]


def test_a_chain_is_over_although_its_successor_cannot_be_cancelled(run: RunDir, queue: FakeQueue) -> None:
    own = started(run, queue)
    queue.is_silent = True
    own.finish(ended("complete"))
    assert read_chain(run).ended == "It ended as complete."


def test_links_that_die_before_they_can_queue_a_job_end_no_chain(run: RunDir, queue: FakeQueue) -> None:
    """Job 101 dies on a bad node before hpc-grpo runs in it: job 102 waits, and queues the jobs behind itself."""
    assert submit_run(run, launch(), "hpc_grpo.driver.main", queue) == "100"
    started(run, queue, "100")
    queue.jobs["100"].is_over = queue.jobs["101"].is_over = True
    queue.ends |= {"100": JobEnd("TIMEOUT", at_time_limit=True), "101": JobEnd("FAILED")}
    third = link(run, queue, "102", "101")
    third.have_two_wait()
    assert queue.asked[-2:] == ["submit 103 after 102", "submit 104 after 102 103"]
    assert third.decide().goes_on


def test_a_link_queues_its_followers_before_it_asks_about_the_job_before(run: RunDir) -> None:
    class Dying(FakeQueue):
        def end_of(self, job_id: str) -> JobEnd:
            raise KeyboardInterrupt  # killed during sacct

    queue = Dying({"8": FakeJob("8")})
    dying = link(run, queue, "8", "7")
    dying.have_two_wait()
    with pytest.raises(KeyboardInterrupt):
        dying.decide()
    assert queue.asked == ["submit 100 after 8", "submit 101 after 8 100"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "a moment later"])
def test_a_disk_that_fails_at_the_start_costs_no_successor(
    run: RunDir, queue: FakeQueue, number: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    own = ChainLink(run, launch(), queue, LinkJob("7", "hpc_grpo.driver.main"), clock)

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as disk:
        if is_late:
            own.have_two_wait()
        disk.setattr(link_module, "write_chain", fails)
        if not is_late:
            own.have_two_wait()
        own.start()
    assert queue.asked == ["submit 100 after 7", "submit 101 after 7 100"]
    clock.now += 30.0
    own.try_again()
    assert len(queue.requests) == 2
    record = read_chain(run)
    assert [entry.job_id for entry in record.links] == ["7", "100", "101"]
    assert record.successor == "100"


def test_a_disk_that_is_full_until_the_kill_forks_no_chain(
    run: RunDir, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job 101 queues 103 and is killed, so 102 queues 104 in its place: one of both goes on."""
    submit_run(run, launch(), "hpc_grpo.driver.main", queue)
    started(run, queue, "100")

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(link_module, "write_chain", fails)
        link(run, queue, "101", "100").have_two_wait()
    started(run, queue, "102", "101")
    asked = ["submit 103 after 101 102", "submit 104 after 102", "submit 105 after 102 104"]
    assert queue.asked[-3:] == asked
    extra, own = link(run, queue, "103", "102"), link(run, queue, "104", "102")
    extra.have_two_wait()
    assert extra.decide().why.startswith("Job 104 carries on in place of this one")
    assert queue.asked[-3:] == asked
    own.have_two_wait()
    assert queue.asked[-1] == "submit 106 after 104 105"


def test_a_record_that_cannot_be_read_at_the_start_is_read_again(
    run: RunDir, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    own = ChainLink(run, launch(), queue, LinkJob("7", "hpc_grpo.driver.main"), clock)

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as disk:
        disk.setattr(link_module, "read_chain", fails)
        own.have_two_wait()
    clock.now += 30.0
    own.try_again()
    assert queue.asked == ["submit 100 after 7", "submit 101 after 7 100"]


def test_a_job_queued_at_a_links_end_is_kept_off_lost_nodes(run: RunDir, queue: FakeQueue) -> None:
    queue.is_silent = True
    own = started(run, queue)
    queue.is_silent = False
    own.finish(ended("node_lost", {"nid002": "power"}))
    assert [queue.jobs[job_id].excluded for job_id in ("100", "101")] == [["nid002"], ["nid002"]]


def test_a_stop_written_while_the_link_starts_cancels_the_successor(run: RunDir, queue: FakeQueue) -> None:
    stopping = StoppingQueue(queue.jobs, stop=run.stop_marker)
    started(run, stopping)
    assert stopping.cancelled == ["100", "101"]


def test_a_link_whose_predecessor_the_user_cancelled_ends_the_chain(run: RunDir, queue: FakeQueue) -> None:
    started(run, queue)
    queue.ends["7"] = CANCELLED
    assert not link(run, queue, "100", "7").decide().goes_on
    assert "cancelled by the user" in read_chain(run).ended


@pytest.mark.parametrize(
    ("ends", "goes_on"),
    [
        ({"7": CANCELLED, "100": JobEnd("FAILED")}, False),
        ({"7": CANCELLED, "100": CANCELLED}, False),
        ({"7": JobEnd("TIMEOUT", at_time_limit=True), "100": CANCELLED}, True),
    ],
    ids=["the next died on a bad node", "all but the last cancelled", "only one that waited cancelled"],
)
def test_a_cancel_counts_where_the_job_had_begun(
    run: RunDir, queue: FakeQueue, ends: dict[str, JobEnd], goes_on: bool
) -> None:
    started(run, queue)
    saved(run, ended("resumable"))
    queue.ends |= ends
    assert link(run, queue, "101", "100").decide().goes_on == goes_on


def test_a_late_link_of_an_earlier_chain_leaves_the_users_new_chain_alone(run: RunDir, queue: FakeQueue) -> None:
    started(run, queue)
    # The user submits the run again as 50, which queues 102 and 103.
    write_chain(run, read_chain(run).with_link("50"))
    queue.jobs["50"] = FakeJob("50")
    started(run, queue, "50")
    assert read_chain(run).successor == "102"
    queue.ends["7"] = CANCELLED
    late = link(run, queue, "100", "7")
    late.have_two_wait()
    assert not late.decide().goes_on
    record = read_chain(run)
    assert (record.successor, record.ended, queue.cancelled) == ("102", "", ["101"])
    assert len(queue.requests) == 4


def test_the_number_of_jobs_counts_from_the_users_own(run: RunDir, queue: FakeQueue) -> None:
    before = ""
    for job_id in ("7", "100", "101"):
        started(run, queue, job_id, before, max_job_chains=2)
        before = job_id
    assert queue.asked == ["submit 100 after 7", "submit 101 after 7 100"]
    again = link(run, queue, "60", max_job_chains=2)
    again.have_two_wait()
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
