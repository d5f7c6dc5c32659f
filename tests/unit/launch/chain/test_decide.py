"""The table of markers x previous state x progress x attempts that a starting link decides by."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hpc_grpo.launch.chain.decide import Facts, PreviousLink, decide
from hpc_grpo.launch.place.slurm.jobs import is_users_cancel
from hpc_grpo.run.attempt import ExitKind

USER = os.getuid()


def previous(kind: ExitKind, slurm_state: str = "FAILED", left_s: float | None = None) -> PreviousLink:
    return PreviousLink("41", kind, "It was so.", slurm_state, left_s)


def facts(link: PreviousLink | None, **changed: Any) -> Facts:
    values: dict[str, Any] = {
        "is_complete": False,
        "stop_asked": False,
        "attempts": 1,
        "max_attempts": None,
        "stalled": 0,
        "max_stalled": 3,
    }
    return Facts(previous=link, **{**values, **changed})


GOES_ON = {
    "handed in by the user": facts(None),
    "handed in again after a chain that gave up": facts(None, attempts=9, max_attempts=2, stalled=9),
    "stopped before the time limit": facts(previous("resumable", "FAILED")),
    "killed at the time limit": facts(previous("running", "TIMEOUT")),
    "asked to end by the time limit": facts(previous("cancelled", "TIMEOUT")),
    "a node lost": facts(previous("running", "NODE_FAIL")),
    "killed out of memory": facts(previous("running", "OUT_OF_MEMORY")),
    "preempted": facts(previous("cancelled", "PREEMPTED")),
    "crashed": facts(previous("crash", "FAILED"), stalled=2),
    "nodes that did not come up": facts(previous("bringup_failed", "FAILED"), stalled=1),
    "cancelled by an administrator": facts(previous("cancelled", f"CANCELLED by {USER + 1}")),
    "unknown to Slurm, told to end near its limit": facts(previous("cancelled", "", left_s=20.0)),
    "unknown to Slurm and killed": facts(previous("running", "")),
    "node-hours left": facts(previous("resumable"), node_hours=7.9, max_node_hours=8.0),
    "one attempt left": facts(previous("resumable"), attempts=4, max_attempts=5),
}
ENDS = {
    "complete": (facts(previous("complete", "COMPLETED"), is_complete=True), "complete", False),
    "complete, handed in again": (facts(None, is_complete=True), "complete", False),
    "asked to stop": (facts(previous("stopped"), stop_asked=True), "STOP", False),
    "asked to stop before it started": (facts(None, stop_asked=True), "STOP", False),
    "cancelled by the user": (facts(previous("resumable", f"CANCELLED by {USER}")), "cancelled by the user", False),
    "cancelled, without accounting": (facts(previous("cancelled", "CANCELLED")), "cancelled by the user", False),
    "told to end hours before its limit": (facts(previous("cancelled", "", left_s=3e4)), "cancelled", False),
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
def test_goes_on(name: str) -> None:
    decision = decide(GOES_ON[name])
    assert decision.goes_on, decision.why
    assert not decision.gave_up


@pytest.mark.parametrize("name", ENDS)
def test_ends_in_words(name: str) -> None:
    given, words, gave_up = ENDS[name]
    decision = decide(given)
    assert not decision.goes_on
    assert words in decision.why
    assert decision.gave_up == gave_up


@pytest.mark.parametrize(
    ("state", "expected"),
    [("CANCELLED by 7", True), ("CANCELLED by 8", False), ("CANCELLED", True), ("TIMEOUT", False), ("", False)],
)
def test_whose_cancel_it_was(state: str, expected: bool) -> None:
    assert is_users_cancel(state, uid=7) == expected
