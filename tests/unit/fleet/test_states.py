"""What becomes of a job after an attempt: the table of states.py, row by row."""

from __future__ import annotations

import re
from typing import Any

import pytest

from hpc_grpo.errors import EXIT_HELD
from hpc_grpo.fleet.settings import FleetSettings
from hpc_grpo.fleet.states import Ending, JobState, Verdict, judge

FRESH = {"retry_count": 0, "max_retries": 2, "stalled": 0, "step": None, "is_cancelled": False}
TRIED = {"retry_count": 1, "max_retries": 2, "stalled": 0, "step": 4, "is_cancelled": False}
USED_UP = {"retry_count": 2, "max_retries": 2, "stalled": 0, "step": 4, "is_cancelled": False}
STALLED = {"retry_count": 0, "max_retries": 2, "stalled": 2, "step": 4, "is_cancelled": False}
CANCELLED = {"retry_count": 0, "max_retries": 2, "stalled": 0, "step": 4, "is_cancelled": True}


@pytest.mark.parametrize(
    ("job", "end", "verdict"),
    [
        (FRESH, Ending("exit", 0), Verdict(JobState.COMPLETED, 0)),
        (CANCELLED, Ending("exit", 0), Verdict(JobState.COMPLETED, 0)),
        (CANCELLED, Ending("exit", 75, step=5), Verdict(JobState.CANCELLED, 0)),
        (CANCELLED, Ending("lost"), Verdict(JobState.CANCELLED, 0)),
        (CANCELLED, Ending("not_started"), Verdict(JobState.CANCELLED, 0)),
        (USED_UP, Ending("not_started"), Verdict(JobState.QUEUED, 2)),
        (FRESH, Ending("exit", 75, step=1), Verdict(JobState.QUEUED, 0)),
        (USED_UP, Ending("exit", 75, step=5), Verdict(JobState.QUEUED, 2)),
        (TRIED, Ending("exit", 75, step=4), Verdict(JobState.QUEUED, 1, stalled=1)),
        (STALLED, Ending("exit", 75, step=4), Verdict(JobState.FAILED, 1, stalled=3, retry_in_s=30.0)),
        (STALLED, Ending("exit", 75, step=5), Verdict(JobState.QUEUED, 0)),
        (FRESH, Ending("exit", 78), Verdict(JobState.FAILED, 0)),
        (FRESH, Ending("exit", EXIT_HELD), Verdict(JobState.FAILED, 1, retry_in_s=30.0)),
        (FRESH, Ending("exit", 1), Verdict(JobState.FAILED, 1, retry_in_s=30.0)),
        (TRIED, Ending("exit", -9), Verdict(JobState.FAILED, 2, retry_in_s=60.0)),
        (TRIED, Ending("exit", None), Verdict(JobState.FAILED, 2, retry_in_s=60.0)),
        (TRIED, Ending("lost"), Verdict(JobState.FAILED, 2, retry_in_s=0.0)),
        (USED_UP, Ending("exit", 1), Verdict(JobState.FAILED, 2)),
        (USED_UP, Ending("lost"), Verdict(JobState.FAILED, 2)),
    ],
)
def test_a_job_after_an_attempt_is_what_the_table_says(job: dict[str, Any], end: Ending, verdict: Verdict) -> None:
    assert judge(job, end, FleetSettings(retry_s=30.0, max_retry_s=3600.0)) == verdict


def test_waits_before_retries_double_up_to_a_bound() -> None:
    settings = FleetSettings(retry_s=30.0, max_retry_s=100.0, max_retries=9)
    tried = [{**FRESH, "retry_count": number, "max_retries": None} for number in range(4)]
    waits = [judge(job, Ending("exit", 1), settings).retry_in_s for job in tried]
    assert waits == [30.0, 60.0, 100.0, 100.0]


@pytest.mark.parametrize(
    ("end", "is_tried_again"),
    [
        (Ending("exit", 1, "RuntimeError: CUDA out of memory"), False),
        (Ending("exit", 1, "RuntimeError: NCCL timeout"), True),
        (Ending("lost", why="CUDA out of memory"), True),
    ],
)
def test_a_reason_that_the_settings_name_is_not_tried_again(end: Ending, is_tried_again: bool) -> None:
    settings = FleetSettings(no_retry=(re.compile(r"out of mem\w+"),))
    assert (judge(FRESH, end, settings).retry_in_s is not None) == is_tried_again
