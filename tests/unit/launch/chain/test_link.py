"""A link of a chain against a Slurm that remembers what it was asked."""

from __future__ import annotations

import time

import pytest

from hpc_grpo.launch.chain import link as chain
from hpc_grpo.launch.chain.link import ChainLink
from hpc_grpo.run.attempt import AttemptRecord, ExitKind
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.lock import EndedJob
from hpc_grpo.run.paths import RunDir
from tests.unit.launch.chain.chain_scene import CANCELLED, FakeSlurm, config, ended, link


def test_a_link_queues_its_successor_with_what_it_has(run: RunDir, fake: FakeSlurm) -> None:
    link(run, "7").start()
    ((successor, after, launch),) = fake.submitted
    assert after == "7"
    assert (launch.num_nodes, launch.slurm.partition, launch.slurm.max_job_chains) == (2, "workq", None)
    record = read_chain(run)
    assert [(entry.job_id, entry.successor_of) for entry in record.links] == [("7", ""), (successor, "7")]
    assert (record.successor, record.ended) == (successor, "")
    link(run, "7").start()
    assert len(fake.submitted) == 1


def test_a_link_writes_down_where_its_output_goes(run: RunDir, fake: FakeSlurm) -> None:
    fake.jobs["7"]["StdOut"] = "/home/u/job-7.out"
    link(run, "7").start()
    assert [entry.output for entry in read_chain(run).links] == ["/home/u/job-7.out", ""]
    fake.is_silent = True
    link(run, "7").start()
    assert read_chain(run).links[0].output == "/home/u/job-7.out"


@pytest.mark.parametrize("kind", ["complete", "config", "stopped"])
def test_a_link_that_is_done_cancels_its_successor(run: RunDir, fake: FakeSlurm, kind: ExitKind) -> None:
    own = link(run, "7")
    own.start()
    own.finish(ended(kind))
    assert fake.cancelled == ["100"]
    record = read_chain(run)
    assert (record.successor, record.ended) == ("", f"It ended as {kind}.")


@pytest.mark.parametrize("signalled", ["", "SIGTERM"])
def test_an_interrupted_link_leaves_its_successor_and_keeps_it_off_lost_nodes(
    run: RunDir, fake: FakeSlurm, signalled: str
) -> None:
    """Signalled: Slurm ended the job for the node."""
    own = link(run, "7")
    own.start()
    own.finish(ended("node_lost", {"nid002": "power"}, signalled))
    assert (fake.cancelled, len(fake.submitted)) == ([], 1)
    assert fake.excluded == {"100": ["nid002"]}


def test_a_slurm_that_cancels_nothing_from_a_node_leaves_the_record_closed(run: RunDir, fake: FakeSlurm) -> None:
    own = link(run, "7")
    own.start()
    fake.is_silent = True
    own.finish(ended("complete"))
    assert read_chain(run).ended == "It ended as complete."


def test_a_successor_that_somebody_cancelled_is_replaced(run: RunDir, fake: FakeSlurm) -> None:
    own = link(run, "7")
    own.start()
    fake.jobs["100"] = {"JobState": "CANCELLED"}
    own.finish(ended("resumable"))
    assert [job for job, _, _ in fake.submitted] == ["100", "101"]
    assert read_chain(run).successor == "101"


def test_after_scancel_nothing_new_is_queued(run: RunDir, fake: FakeSlurm) -> None:
    own = link(run, "7")
    own.start()
    fake.jobs["100"] = {"JobState": "CANCELLED"}
    own.finish(ended("resumable", signalled="SIGTERM"))
    assert len(fake.submitted) == 1


def test_a_slurm_that_does_not_answer_costs_the_attempt_nothing(run: RunDir, fake: FakeSlurm) -> None:
    fake.is_silent = True
    own = link(run, "7")
    own.start()
    own.finish(ended("resumable"))
    assert read_chain(run).successor == ""
    fake.is_silent = False
    own.finish(ended("resumable"))
    assert read_chain(run).successor == "100"


def test_a_successor_that_sbatch_refused_is_tried_again_while_the_link_runs(
    run: RunDir, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(chain.time, "monotonic", lambda: now[0])
    fake.is_silent = True
    own = link(run, "7")
    own.start()
    fake.is_silent = False
    own.queue_again()
    assert fake.submitted == []
    now[0] += 300.0
    own.queue_again()
    own.queue_again()
    assert len(fake.submitted) == 1
    assert read_chain(run).successor == "100"


def test_a_stop_written_while_the_link_starts_cancels_the_successor(run: RunDir, fake: FakeSlurm) -> None:
    run.stop_marker.touch()
    link(run, "7").start()
    assert fake.cancelled == ["100"]


def test_a_successor_knows_that_its_job_was_cancelled(run: RunDir, fake: FakeSlurm) -> None:
    link(run, "7").start()
    fake.final["7"] = CANCELLED
    successor = link(run, "100", "7")
    assert not successor.decide().goes_on
    assert "cancelled by the user" in read_chain(run).ended


def test_a_late_successor_of_an_earlier_chain_touches_nothing(run: RunDir, fake: FakeSlurm) -> None:
    link(run, "7").start()
    # The user hands the run in again as 50, which queues 101.
    write_chain(run, read_chain(run).with_link("50"))
    fake.jobs["50"] = {"JobState": "RUNNING"}
    link(run, "50").start()
    assert read_chain(run).successor == "101"
    fake.final["7"] = CANCELLED
    assert not link(run, "100", "7").decide().goes_on
    record = read_chain(run)
    assert (record.successor, record.ended, fake.cancelled) == ("101", "", [])


def test_the_number_of_jobs_counts_from_the_users_own(run: RunDir, fake: FakeSlurm) -> None:
    before = ""
    for job_id in ("7", "100", "101"):
        fake.jobs[job_id] = {"JobState": "RUNNING"}
        link(run, job_id, before, max_job_chains=2).start()
        before = job_id
    assert [job for job, _, _ in fake.submitted] == ["100", "101"]
    fake.jobs["60"] = {"JobState": "RUNNING"}
    again = link(run, "60", max_job_chains=2)
    assert again.decide().goes_on
    again.start()
    assert read_chain(run).successor == "102"


def test_jobs_that_die_before_they_begin_end_the_chain_too(run: RunDir, fake: FakeSlurm) -> None:
    record = ChainRecord().with_link("1").with_link("2", "1").with_link("3", "2").with_link("4", "3")
    write_chain(run, record)
    decision = link(run, "4", "3").decide()
    assert decision.gave_up
    assert "No new checkpoint in 3" in decision.why


def test_a_node_that_slurm_lost_sight_of_may_still_hold_the_run(run: RunDir, fake: FakeSlurm) -> None:
    known = {"TIMEOUT": EndedJob("7", is_gone=True), "NODE_FAIL": EndedJob("7", is_gone=False), "": None}
    for state, before in known.items():
        fake.final["7"] = state
        assert link(run, "100", "7").before == before


def test_where_jobs_cannot_submit_each_link_takes_the_one_queued_behind_it(run: RunDir, fake: FakeSlurm) -> None:
    """Three jobs were queued at once; the first is interrupted, the second completes the run."""
    record = ChainRecord().with_link("7").with_link("8", "7").with_link("9", "8")
    write_chain(run, record)
    fake.jobs |= {"8": {"JobState": "PENDING"}, "9": {"JobState": "PENDING"}}
    first = ChainLink(run, config(2, jobs_can_submit=False), "7", "", "hpc_grpo.driver.main")
    first.start()
    assert read_chain(run).successor == "8"
    first.finish(ended("resumable"))
    assert (fake.submitted, fake.cancelled) == ([], [])
    fake.final["7"] = "TIMEOUT"
    second = ChainLink(run, config(2, jobs_can_submit=False), "8", "7", "hpc_grpo.driver.main")
    assert second.decide().goes_on
    second.start()
    assert read_chain(run).successor == "9"
    second.finish(ended("complete"))
    assert (fake.submitted, fake.cancelled) == ([], ["9"])
    assert (read_chain(run).successor, read_chain(run).ended) == ("", "It ended as complete.")


def test_all_that_wait_are_cancelled_when_the_first_link_completes_the_run(run: RunDir, fake: FakeSlurm) -> None:
    write_chain(run, ChainRecord().with_link("7").with_link("8", "7").with_link("9", "8"))
    first = ChainLink(run, config(2, jobs_can_submit=False), "7", "", "hpc_grpo.driver.main")
    first.start()
    first.finish(ended("complete"))
    assert fake.cancelled == ["8", "9"]
    assert read_chain(run).ended == "It ended as complete."


def test_a_successor_asks_for_what_is_left_of_the_node_hours(run: RunDir, fake: FakeSlurm) -> None:
    """Of 3 node-hours this job of 2 nodes may take 2, so 30 minutes of 2 nodes are left."""
    ChainLink(run, config(max_node_hours=3.0), "7", "", "hpc_grpo.driver.main").start()
    assert [launch.slurm.time_min for _, _, launch in fake.submitted] == [30]


def test_where_the_node_hours_are_used_up_the_chain_ends_in_words(run: RunDir, fake: FakeSlurm) -> None:
    own = ChainLink(run, config(max_node_hours=2.0), "7", "", "hpc_grpo.driver.main")
    own.start()
    attempt = AttemptRecord(1, "7", "slurm", ["nid001", "nid002"], time.time() - 3600, None, 1)
    attempt.end("resumable", 75, "Checkpointed.")
    folder = run.attempt(1, "7")
    folder.mkdir(parents=True)
    attempt.save(folder)
    own.finish(attempt)
    assert fake.submitted == []
    assert read_chain(run).ended.startswith("The jobs of this run have taken 2.0 of launch.slurm.max_node_hours = 2: ")


def test_a_job_that_crashes_early_leaves_its_hours_to_the_next(run: RunDir, fake: FakeSlurm) -> None:
    own = ChainLink(run, config(max_node_hours=2.0), "7", "", "hpc_grpo.driver.main")
    own.start()
    attempt = AttemptRecord(1, "7", "slurm", ["nid001", "nid002"], time.time() - 350, None, 1)
    attempt.end("crash", 1, "A bug.")
    folder = run.attempt(1, "7")
    folder.mkdir(parents=True)
    attempt.save(folder)
    own.finish(attempt)
    assert [launch.slurm.time_min for _, _, launch in fake.submitted] == [54]


def test_a_walltime_that_the_ceiling_cut_short_is_not_handed_on(run: RunDir, fake: FakeSlurm) -> None:
    """The job before took 1 of 3 node-hours at most and crashed at once; this one was queued with 30 minutes."""
    fake.jobs["7"] |= {"TimeLimit": "00:30:00"}
    ChainLink(run, config(max_node_hours=4.0), "7", "", "hpc_grpo.driver.main").start()
    assert [launch.slurm.time_min for _, _, launch in fake.submitted] == [60]


def test_how_a_chain_goes_on_is_as_the_config_says_now(run: RunDir, fake: FakeSlurm) -> None:
    ChainLink(run, config(max_node_hours=4.0), "7", "", "hpc_grpo.driver.main").start()
    launch = read_chain(run).launch(config(max_job_chains=3, max_node_hours=9.0).launch)
    assert (launch.slurm.max_node_hours, launch.slurm.max_job_chains, launch.num_nodes) == (9.0, 3, 2)
