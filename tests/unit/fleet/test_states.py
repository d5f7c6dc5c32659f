"""What becomes of a job after an attempt: the table of states.py, row by row."""

from __future__ import annotations

import re

import pytest

from hpc_grpo.errors import EXIT_HELD
from hpc_grpo.fleet.states import Ending, JobState, Tries, Verdict, judge

FRESH = Tries(retry_count=0, max_retries=2, stalled=0, step=None, is_cancelled=False)
TRIED = Tries(retry_count=1, max_retries=2, stalled=0, step=4, is_cancelled=False)
USED_UP = Tries(retry_count=2, max_retries=2, stalled=0, step=4, is_cancelled=False)
STALLED = Tries(retry_count=0, max_retries=2, stalled=2, step=4, is_cancelled=False)
CANCELLED = Tries(retry_count=0, max_retries=2, stalled=0, step=4, is_cancelled=True)


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
def test_a_job_after_an_attempt_is_what_the_table_says(job: Tries, end: Ending, verdict: Verdict) -> None:
    assert judge(job, end, retry_s=30.0, max_retry_s=3600.0) == verdict


def test_waits_before_retries_double_up_to_a_bound() -> None:
    waits = [judge(Tries(n, 9, 0, None, False), Ending("exit", 1), 30.0, 100.0).retry_in_s for n in range(4)]
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
    assert (judge(FRESH, end, 30.0, 3600.0, [re.compile(r"out of mem\w+")]).retry_in_s is not None) == is_tried_again
