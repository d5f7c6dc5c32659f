"""In which state a run is: one word, derived from its records."""

from __future__ import annotations

from typing import Literal

from hpc_grpo.report.records import RunRecords, ended_by_time_limit
from hpc_grpo.run.attempt import AttemptRecord

Standing = Literal[
    "new",
    "submitted",
    "starting",
    "training",
    "stopping",
    "waiting",
    "stopped",
    "complete",
    "failed",
    "cancelled",
    "lost",
]
"""`submitted`: no attempt of the newest job yet. `starting`: an attempt runs, no step of it has ended.
`waiting`: the chain's next job is to carry on. `lost`: said to be running, without a sign of life."""

_OVER: tuple[Standing, ...] = ("complete", "failed", "stopped", "cancelled")

_CARRIED_ON = ("running", "resumable", "crash", "node_lost", "bringup_failed")
"""What the next job of a chain carries on after; `running` is the record of an attempt that was killed."""

_AFTER: dict[str, Standing] = {
    "resumable": "stopped",
    "stopped": "stopped",
    "complete": "stopped",  # without COMPLETE: the run was extended since
}
"""Where an attempt leaves a run without a further job; the other kinds leave it failed."""


def standing(records: RunRecords, now: float) -> Standing:
    """The state of a run at `now`, in unix seconds."""
    if records.is_complete:
        return "complete"
    newest = records.newest
    if records.is_held(now) and (newest is None or _is_underway(records, newest)):
        return _while_held(records)
    if records.stop_asked:
        return "cancelled" if newest is not None and _was_cancelled(records, newest) else "stopped"
    if newest is not None and records.waiting_job and _is_carried_on(newest):
        return "waiting"
    if (link := records.unstarted_link) is not None and link.job_id != records.waiting_job:
        return "submitted"
    if newest is None:
        return "submitted" if records.unstarted_link else "new"
    if newest.exit_kind == "running" and not records.chain.ended:
        return "lost"
    return "cancelled" if _was_cancelled(records, newest) else _AFTER.get(newest.exit_kind, "failed")


def is_over(records: RunRecords, now: float) -> bool:
    """Whether nothing more will happen in the run directory until the user does something."""
    return standing(records, now) in _OVER and not records.is_held(now)


def _is_underway(records: RunRecords, newest: AttemptRecord) -> bool:
    """The holder takes the run before its attempt has a record, and gives it up after the record has an end."""
    assert records.holder is not None
    return records.holder.attempt > newest.attempt or newest.exit_kind == "running"


def _while_held(records: RunRecords) -> Standing:
    assert records.holder is not None
    if records.stop_asked:
        return "stopping"
    state = records.state
    if state is None or state.attempt != records.holder.attempt or state.phase == "starting":
        return "starting"
    return "stopping" if state.phase == "stopped" else "training"


def _was_cancelled(records: RunRecords, newest: AttemptRecord) -> bool:
    if newest.was_killed_when_told_to_end:
        return not ended_by_time_limit(newest, records.last_sign_of_life())
    return newest.exit_kind == "cancelled"


def _is_carried_on(newest: AttemptRecord) -> bool:
    at_limit = newest.exit_kind == "cancelled" and ended_by_time_limit(newest, None)
    return newest.exit_kind in _CARRIED_ON or at_limit
