"""The states of a job, their transitions, and the next state after an attempt has ended: pure functions.

| an attempt ended                        | the job is then | retry_count | again after |
|-----------------------------------------|-----------------|-------------|-------------|
| with exit code 0                        | completed       |             |             |
| any other way, and it was cancelled     | cancelled       |             |             |
| before it began                         | queued          |             | at once     |
| 75, without progress 3 times in a row   | failed          | + 1         | back-off    |
| 75 in other cases                       | queued          |             | at once     |
| 78, or a reason that matches `no_retry` | failed          |             | never       |
| 73 (held), any other code, a signal     | failed          | + 1         | back-off    |
| its VM was lost                         | failed          | + 1         | at once     |

Progress is a newer checkpoint than before. A `failed` job with a `retry_at` is queued again at that time. Without a
`retry_at`, as after the last retry, it stays failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from hpc_grpo.errors import EXIT_COMPLETE, EXIT_CONFIG, EXIT_RESUMABLE

if TYPE_CHECKING:  # VMs judge nothing, and need no pydantic
    from hpc_grpo.fleet.settings import FleetSettings

_MAX_STALLED = 3

Int32 = Annotated[int, Interval(ge=-(1 << 31), lt=1 << 31)]
"""An integer of a size that every database accepts."""


class JobState(StrEnum):
    """A job's states. No row has `pending`: jobs.py computes it for a queued job that fits on no VM's free GPUs.

    Only the user's `requeue` ends `completed` and `cancelled`. A due retry or a cancel also ends `failed`.
    """

    QUEUED = "queued"
    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class VmState(StrEnum):
    """A VM's states. `new`: never seen. `stale`: its last visit failed or is old. `lost`: its attempts have ended."""

    NEW = "new"
    READY = "ready"
    STALE = "stale"
    LOST = "lost"


@dataclass(frozen=True)
class Ending:
    """How an attempt ended. `code` is its exit code, negative for a signal, None if unknown.

    `why` is one line for the user. `step` is the step of the run's newest checkpoint, None without one.
    """

    kind: Literal["exit", "not_started", "lost"]
    code: Int32 | None = None
    why: str = ""
    step: Int32 | None = None


@dataclass(frozen=True)
class Verdict:
    """The next state of a job. `retry_in_s` is None if no retry follows."""

    state: JobState
    retry_count: int
    stalled: int = 0
    retry_in_s: float | None = None


def judge(job: Mapping[Any, Any], end: Ending, settings: FleetSettings) -> Verdict:
    """Return the next state of a job after an attempt, by the table above. `job` is the job's row."""
    tries: int = job["retry_count"]
    if end.kind == "exit" and end.code == EXIT_COMPLETE:
        return Verdict(JobState.COMPLETED, tries)
    if job["is_cancelled"]:
        return Verdict(JobState.CANCELLED, tries)
    if end.kind == "not_started":
        return Verdict(JobState.QUEUED, tries, job["stalled"])
    stalled = 0
    if end.kind == "exit" and end.code == EXIT_RESUMABLE:
        has_moved = end.step is not None and (job["step"] is None or end.step > job["step"])
        stalled = 0 if has_moved else job["stalled"] + 1
        if stalled < _MAX_STALLED:
            return Verdict(JobState.QUEUED, tries, stalled)
    elif end.kind == "exit" and (end.code == EXIT_CONFIG or any(each.search(end.why) for each in settings.no_retry)):
        return Verdict(JobState.FAILED, tries)
    if tries >= (settings.max_retries if job["max_retries"] is None else job["max_retries"]):
        return Verdict(JobState.FAILED, tries, stalled)
    wait_s = 0.0 if end.kind == "lost" else min(settings.max_retry_s, settings.retry_s * 2.0**tries)
    return Verdict(JobState.FAILED, tries + 1, stalled, wait_s)
