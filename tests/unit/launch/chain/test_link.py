"""A link of a chain does what is decided, and keeps the record."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.chain import link as link_module
from hpc_grpo.launch.chain.decide import News
from hpc_grpo.launch.chain.link import ChainLink, LinkJob, notify
from hpc_grpo.launch.chain.submit import submit_run
from hpc_grpo.launch.place.job_queue import JobEnd, JobRequest
from hpc_grpo.run.attempt import AttemptRecord, ExitKind
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.lock import EndedJob, LockOwner
from hpc_grpo.run.paths import RunDir
from tests.support.links import CANCELLED, Clock, ended, launch, link, saved, started, told, two_nodes_by_hand
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
    own = ChainLink(run, launch(), queue, LinkJob(job_id="7", driver="hpc_grpo.driver.main"), clock)

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
    assert extra.decide().why.startswith("Job 104 resumes the run in place of this one")
    assert queue.asked[-3:] == asked
    own.have_two_wait()
    assert queue.asked[-1] == "submit 106 after 104 105"


def test_a_record_that_cannot_be_read_at_the_start_is_read_again(
    run: RunDir, queue: FakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    own = ChainLink(run, launch(), queue, LinkJob(job_id="7", driver="hpc_grpo.driver.main"), clock)

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
    own = ChainLink(run, launch(), queue, LinkJob(job_id="7", driver="hpc_grpo.driver.main"), clock)
    own.have_two_wait()
    own.start()
    queue.is_silent = False
    own.try_again()
    assert queue.requests == []
    clock.now += 300.0
    own.try_again()
    own.try_again()
    assert (len(queue.requests), queue.hurried) == (2, 2)
    assert read_chain(run).successor == "100"


def test_what_was_given_by_hand_is_asked_again_some_minutes_later(run: RunDir, queue: FakeQueue) -> None:
    clock = Clock()
    queue.jobs["7"].given, queue.is_silent = two_nodes_by_hand, True
    own = ChainLink(run, launch(), queue, LinkJob(by_hand=True, job_id="7", driver="hpc_grpo.driver.main"), clock)
    own.have_two_wait()
    queue.is_silent = False
    own.start()
    clock.now += 300.0
    own.try_again()
    assert asked(queue) == [(2, "workq")] * 2
    assert read_chain(run).launch(launch()).num_nodes == 2


def test_a_job_by_hand_waits_no_minute_for_what_it_was_given(run: RunDir) -> None:
    class Busy(FakeQueue):
        def show(self, job_id: str) -> FakeJob | None:
            assert self.hurried
            raise LaunchError("scontrol gave no answer within 10 s")

    queue = Busy({"7": FakeJob("7")})
    link(run, queue, by_hand=True).have_two_wait()
    assert queue.asked == ["submit 100 after 7", "submit 101 after 7 100"]


def test_a_request_that_failed_is_looked_for_by_its_name_in_the_next_try(run: RunDir) -> None:
    tried: list[JobRequest] = []

    class Doubtful(FakeQueue):
        def submit(self, request: JobRequest) -> str:
            tried.append(request)
            if len(tried) == 1:
                raise LaunchError("sbatch: Socket timed out")
            return super().submit(request)

    own = link(run, Doubtful({"7": FakeJob("7")}))
    own.have_two_wait()
    own.have_two_wait()
    first, again, second = tried
    assert (again.name, again.may_be_queued) == (first.name, True)
    assert second.name != first.name
    assert [first.may_be_queued, second.may_be_queued] == [False, False]


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
    assert told(run) == ["ended: Job 7 was cancelled by the user; hpc-grpo submit resumes the run."]


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
    assert told(run) == ["retrying: Job 7 ended as node_lost; resuming the run."]


def test_the_successor_tells_of_a_job_that_was_killed_without_a_record(run: RunDir, queue: FakeQueue) -> None:
    started(run, queue)
    queue.ends["7"] = JobEnd("OUT_OF_MEMORY")
    successor = link(run, queue, "100", successor_of="7")
    assert successor.decide().goes_on
    successor.tell()
    assert told(run) == ["retrying: Job 7 ended without a record (OUT_OF_MEMORY); resuming the run."]


def test_a_job_submitted_again_that_cannot_go_on_is_news(run: RunDir, queue: FakeQueue) -> None:
    write_chain(run, replace(read_chain(run).with_link("6"), ended="Gave up."))
    run.stop_marker.touch()
    own = link(run, queue)
    assert not own.decide().goes_on
    own.tell()
    assert told(run) == ["ended: The STOP file asks the run to end; hpc-grpo submit resumes the run."]
