"""The states of a job, which follow which, and what becomes of a job when an attempt at it is over: pure functions.

| an attempt ended                        | the job is then | retry_count | again after |
|-----------------------------------------|-----------------|-------------|-------------|
| 0                                       | completed       |             |             |
| any other way, and it was cancelled     | cancelled       |             |             |
| before it began                         | queued          |             | at once     |
| 75, with a newer checkpoint than before | queued          |             | at once     |
| 75, three in a row without one          | failed          | + 1         | back-off    |
| 78, or why matches `no_retry`           | failed          |             | never       |
| 73 (held), any other code, a signal     | failed          | + 1         | back-off    |
| its VM was lost                         | failed          | + 1         | at once     |

`failed` with a `retry_at` is queued again then; without one, and where retries are used up, it is final.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from hpc_grpo.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_RESUMABLE


class JobState(StrEnum):
    """`pending` is computed for users (jobs.py), and in no row: a queued job that the free GPUs of no VM fit."""

    QUEUED = "queued"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class VmState(StrEnum):
    """`new`: never seen. `stale`: not seen lately, or its last visit failed. `lost`: what ran there is over."""

    NEW = "new"
    READY = "ready"
    STALE = "stale"
    LOST = "lost"


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.CANCELLED}),
    JobState.RUNNING: frozenset({JobState.QUEUED, JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED}),
    JobState.COMPLETED: frozenset({JobState.QUEUED}),
    JobState.FAILED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
}
"""`completed` and `cancelled` are left by the user's own `requeue` alone; `failed` also by a retry that is due."""

_MAX_STALLED = 3

EndKind = Literal["exit", "not_started", "lost"]


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. `code` is its exit code, negative for a signal, None where nobody knows.

    `step` is that of the run's newest checkpoint, None where it has none; `why` one line for the user.
    """

    kind: EndKind
    code: int | None = None
    why: str = ""
    step: int | None = None


@dataclass(frozen=True)
class Standing:
    """What a job's row says that decides what comes after an attempt."""

    retry_count: int
    max_retries: int
    stalled: int
    step: int | None
    is_cancelled: bool


@dataclass(frozen=True)
class Verdict:
    """`retry_in_s` is None where nothing is tried again."""

    state: JobState
    retry_count: int
    stalled: int = 0
    retry_in_s: float | None = None


def judge(job: Standing, end: Ending, retry_s: float, max_retry_s: float, no_retry: Sequence[str] = ()) -> Verdict:
    """Return what becomes of a job after an attempt: the table above."""
    if end.kind == "exit" and end.code == EXIT_COMPLETE:
        return Verdict(JobState.COMPLETED, job.retry_count)
    if job.is_cancelled:
        return Verdict(JobState.CANCELLED, job.retry_count)
    if end.kind == "not_started":
        return Verdict(JobState.QUEUED, job.retry_count, job.stalled)
    is_final = end.code == EXIT_CONFIG or any(re.search(pattern, end.why) for pattern in no_retry)
    if end.kind == "exit" and end.code != EXIT_RESUMABLE and is_final:
        return Verdict(JobState.FAILED, job.retry_count)
    stalled = 0
    if end.kind == "exit" and end.code == EXIT_RESUMABLE:
        has_moved = end.step is not None and (job.step is None or end.step > job.step)
        stalled = 0 if has_moved else job.stalled + 1
        if stalled < _MAX_STALLED:
            return Verdict(JobState.QUEUED, job.retry_count, stalled)
    if job.retry_count >= job.max_retries:
        return Verdict(JobState.FAILED, job.retry_count, stalled)
    wait_s = 0.0 if end.kind == "lost" else min(max_retry_s, retry_s * 2.0**job.retry_count)
    return Verdict(JobState.FAILED, job.retry_count + 1, stalled, wait_s)
