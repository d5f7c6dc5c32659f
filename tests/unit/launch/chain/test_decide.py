"""The tables that a link decides by: at its start, at its end, and what the user has to hear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.chain.decide import (
    News,
    PreviousLink,
    StartFacts,
    Succession,
    decide_start,
    decide_succession,
    may_queue_successor,
    news_at_end,
    node_hours_asked,
    node_hours_used,
    within_node_hours,
)
from hpc_grpo.launch.place.job_queue import JobEnd
from hpc_grpo.run.attempt import AttemptRecord, ExitKind

FAILED = JobEnd("FAILED")
KILLED = JobEnd("OUT_OF_MEMORY")
TIMEOUT = JobEnd("TIMEOUT", at_time_limit=True)
LOST_A_NODE = JobEnd("NODE_FAIL", lost_a_node=True)
CANCELLED_BY_USER = JobEnd("CANCELLED by 7", by_user=True)
CANCELLED_BY_ADMINISTRATOR = JobEnd("CANCELLED by 0")
UNKNOWN = JobEnd()


def previous(
    kind: ExitKind, end: JobEnd = FAILED, left_s: float | None = None, was_killed: bool = False
) -> PreviousLink:
    return PreviousLink("41", kind, "It was so.", end, left_s, was_killed)


def facts(link: PreviousLink | None, **changed: Any) -> StartFacts:
    values: dict[str, Any] = {
        "is_complete": False,
        "stop_asked": False,
        "attempts": 1,
        "max_attempts": None,
        "stalled": 0,
        "max_stalled": 3,
    }
    return StartFacts(previous=link, **{**values, **changed})


GOES_ON = {
    "submitted by the user": facts(None),
    "submitted again after a chain that gave up": facts(None, attempts=9, max_attempts=2, stalled=9),
    "stopped before the time limit": facts(previous("resumable")),
    "killed at the time limit": facts(previous("running", TIMEOUT)),
    "asked to end by the time limit": facts(previous("cancelled", TIMEOUT)),
    "a node lost": facts(previous("running", LOST_A_NODE)),
    "killed out of memory": facts(previous("running", KILLED)),
    "preempted": facts(previous("cancelled", JobEnd("PREEMPTED"))),
    "crashed": facts(previous("crash"), stalled=2),
    "nodes that did not come up": facts(previous("bringup_failed"), stalled=1),
    "cancelled by an administrator": facts(previous("cancelled", CANCELLED_BY_ADMINISTRATOR)),
    "unknown to the queue, told to end near its limit": facts(previous("cancelled", UNKNOWN, left_s=20.0)),
    "unknown to the queue and killed": facts(previous("running", UNKNOWN)),
    "node-hours left": facts(previous("resumable"), node_hours=7.9, max_node_hours=8.0),
    "one attempt left": facts(previous("resumable"), attempts=4, max_attempts=5),
}
ENDS = {
    "complete": (facts(previous("complete", JobEnd("COMPLETED")), is_complete=True), "complete", False),
    "complete, submitted again": (facts(None, is_complete=True), "complete", False),
    "asked to stop": (facts(previous("stopped"), stop_asked=True), "STOP", False),
    "asked to stop before it started": (facts(None, stop_asked=True), "STOP", False),
    "cancelled by the user": (facts(previous("resumable", CANCELLED_BY_USER)), "cancelled by the user", False),
    "unknown to the queue, told to end hours before its limit": (
        facts(previous("cancelled", UNKNOWN, left_s=3e4)),
        "cancelled by the user",
        False,
    ),
    "rejected configuration": (facts(previous("config")), "configuration", True),
    "no progress": (facts(previous("crash"), stalled=3), "No new checkpoint in 3 attempts", True),
    "node-hours used": (
        facts(previous("resumable"), node_hours=8.2, max_node_hours=8.0),
        "8.2 node-hours have been used; launch.slurm.max_node_hours = 8",
        True,
    ),
    "all jobs used": (facts(previous("resumable"), attempts=5, max_attempts=5), "max_job_chains", True),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_a_link_goes_on(name: str) -> None:
    decision = decide_start(GOES_ON[name])
    assert decision.goes_on, decision.why
    assert not decision.gave_up


@pytest.mark.parametrize("name", ENDS)
def test_a_link_ends_the_chain_and_says_why(name: str) -> None:
    given, reason, gave_up = ENDS[name]
    decision = decide_start(given)
    assert not decision.goes_on
    assert reason in decision.why
    assert decision.gave_up == gave_up
    assert decision.news == News("complete" if given.is_complete else "ended", decision.why)


@pytest.mark.parametrize("name", ENDS)
def test_an_end_that_the_user_knows_of_is_no_news(name: str) -> None:
    given, _, _ = ENDS[name]
    assert decide_start(StartFacts(**{**vars(given), "user_knows": True})).news is None


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (previous("running", KILLED), "Job 41 ended without a record (OUT_OF_MEMORY); resuming the run."),
        (previous("running", UNKNOWN), "Job 41 ended without a record (unknown to the queue); resuming the run."),
        (previous("cancelled", CANCELLED_BY_ADMINISTRATOR), "Job 41 ended as cancelled; resuming the run."),
        (previous("node_lost", LOST_A_NODE, was_killed=True), "Job 41 ended as node_lost; resuming the run."),
        (previous("node_lost"), None),  # it told the user itself
        (previous("crash"), None),
        (previous("running", TIMEOUT), None),  # the time limit is no grief
        (previous("cancelled", TIMEOUT), None),
        (previous("resumable", KILLED, was_killed=True), None),
        (None, None),
    ],
)
def test_a_link_tells_of_the_one_before_what_that_could_not(link: PreviousLink | None, why: str | None) -> None:
    assert decide_start(facts(link)).news == (None if why is None else News("retrying", why))


def ended(kind: ExitKind, lost: bool = False, signalled: str = "") -> AttemptRecord:
    record = AttemptRecord(1, "7", "slurm", ["nid001"], 0.0, None, 1)
    record.end(kind, 1, f"It ended as {kind}.")
    record.lost_nodes, record.signalled = ({"nid001": "power"} if lost else {}), signalled
    return record


@pytest.mark.parametrize(
    ("attempt", "stop_asked", "expected"),
    [
        (ended("complete"), False, "end the chain"),
        (ended("complete", signalled="SIGTERM"), False, "end the chain"),
        (ended("stopped"), True, "end the chain"),
        (ended("config"), False, "end the chain"),
        (ended("crash"), True, "end the chain"),
        (ended("crash"), False, "have one wait"),
        (ended("resumable"), False, "have one wait"),
        (ended("bringup_failed"), False, "have one wait"),
        (ended("node_lost", lost=True), False, "have one wait"),
        (ended("node_lost", lost=True, signalled="SIGTERM"), False, "keep it off lost nodes"),
        (ended("cancelled", signalled="SIGTERM"), False, "leave it"),
        (ended("resumable", signalled="SIGTERM"), False, "leave it"),
    ],
)
def test_the_end_of_an_attempt_decides_on_the_successor(
    attempt: AttemptRecord, stop_asked: bool, expected: Succession
) -> None:
    assert decide_succession(attempt, stop_asked) == expected


@pytest.mark.parametrize(
    ("kind", "has_successor", "event"),
    [
        ("crash", True, "retrying"),
        ("node_lost", True, "retrying"),
        ("crash", False, "ended"),
        ("resumable", True, None),
        ("resumable", False, "ended"),
        ("cancelled", True, None),
        ("config", False, "ended"),
    ],
)
def test_the_end_of_an_attempt_decides_what_the_user_hears(
    kind: ExitKind, has_successor: bool, event: str | None
) -> None:
    news = news_at_end(ended(kind), False, has_successor, "")
    assert (news.event if news else None) == event
    completed = news_at_end(ended(kind), True, has_successor, "")
    assert completed == News("complete", f"It ended as {kind}.")


def test_the_reason_why_a_chain_ended_goes_before_the_attempts() -> None:
    assert news_at_end(ended("crash"), False, False, "No node-hours.") == News("ended", "No node-hours.")


@pytest.mark.parametrize(
    ("jobs_can_submit", "max_job_chains", "links_before", "expected"),
    [(True, None, 99, True), (True, 2, 1, True), (True, 2, 2, False), (True, 0, 0, False), (False, 9, 0, False)],
)
def test_a_successor_is_queued_within_the_users_limits(
    jobs_can_submit: bool, max_job_chains: int | None, links_before: int, expected: bool
) -> None:
    slurm = {"jobs_can_submit": jobs_can_submit, "max_job_chains": max_job_chains}
    assert may_queue_successor(LaunchConfig.model_validate({"slurm": slurm}), links_before) == expected


def four_nodes(max_node_hours: float | None) -> LaunchConfig:
    slurm = {"time_min": 120, "max_node_hours": max_node_hours}
    return LaunchConfig.model_validate({"num_nodes": 4, "slurm": slurm})


@pytest.mark.parametrize(("ceiling", "used", "expected"), [(None, 1e6, 120), (20.0, 12.0, 120), (20.0, 14.0, 90)])
def test_a_job_asks_for_no_more_than_is_left_of_the_node_hours(
    ceiling: float | None, used: float, expected: int
) -> None:
    asked = within_node_hours(four_nodes(ceiling), used)
    assert asked.slurm.time_min == expected
    assert node_hours_asked(asked) == 4 * expected / 60


def test_a_job_whose_nodes_could_not_come_up_in_what_is_left_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"taken 19\.8 of launch\.slurm\.max_node_hours = 20: .* 4 node\(s\)"):
        within_node_hours(four_nodes(20.0), 19.8)


HOUR = 3600.0


def charged(nodes: int, started_h: float, ended_h: float | None, ends_h: float | None = None) -> AttemptRecord:
    names = [f"nid{number:03}" for number in range(nodes)]
    ends_at = None if ends_h is None else ends_h * HOUR
    record = AttemptRecord(1, "7", "slurm", names, started_h * HOUR, ends_at, 1)
    record.ended_at = None if ended_h is None else ended_h * HOUR
    return record


@pytest.mark.parametrize(
    ("attempts", "used"),
    [
        ([], 0.0),
        ([charged(2, 0, 1), charged(4, 5, 5.5)], 4.0),
        ([charged(2, 0, None, ends_h=8)], 8.0),  # still going on, or so it seems, for four hours
        ([charged(2, 0, None, ends_h=3)], 6.0),  # killed without a word: no longer than its allocation
        ([charged(2, 0, None, ends_h=3), charged(1, 1, 2)], 3.0),  # and the next began before that
        ([replace(charged(2, 0, None), source="local"), charged(1, 1, 2)], 1.0),  # a workstation's hours are no job's
        ([charged(1, 9, None)], 0.0),  # a clock that is behind takes nothing off
    ],
)
def test_node_hours_are_never_counted_too_low(attempts: list[AttemptRecord], used: float) -> None:
    assert node_hours_used(attempts, now=4 * HOUR) == pytest.approx(used)
