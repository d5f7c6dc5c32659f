"""A run in the few values that `status`, `list` and `watch` show."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_grpo.report.records import RunRecords
from hpc_grpo.report.standing import Standing, standing
from hpc_grpo.run.attempt import AttemptRecord

_BAD = ("config", "crash", "cancelled", "bringup_failed", "node_lost")
_GOOD = ("complete", "stopped")
_RUNNING = ("starting", "training", "stopping")


@dataclass(frozen=True)
class RunSummary:
    """Where a run stands. Unknown values are None; a field ending in `_s` is in seconds, `_at` in unix seconds.

    `step` of `total_steps` have ended. `walltime_left_s` is that of the running attempt's allocation,
    `heartbeat_age_s` the time since its supervisor's last sign of life. `problem` says in words what last went wrong.
    """

    run: str
    path: str
    state: Standing
    created_at: float | None = None
    attempt: int | None = None
    job_id: str | None = None
    step: int | None = None
    total_steps: int | None = None
    reward: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    walltime_left_s: float | None = None
    heartbeat_age_s: float | None = None
    problem: str | None = None


def summarize(records: RunRecords, now: float) -> RunSummary:
    """The run at `now`, in unix seconds."""
    now_is, newest, state = standing(records, now), records.newest, records.state
    link = records.unstarted_link
    ends_at = newest.ends_at if newest is not None and now_is in _RUNNING else None
    sign = records.last_sign_of_life() if now_is in (*_RUNNING, "lost") else None
    return RunSummary(
        run=records.run.path.name,
        path=str(records.run.path),
        state=now_is,
        created_at=records.created_at,
        attempt=newest.attempt if newest else None,
        job_id=newest.job_id if newest else link.job_id if link else None,
        step=state.step if state else None,
        total_steps=state.total_steps if state else None,
        reward=_finite(state.reward) if state else None,
        tokens_per_s=_finite(state.tokens_per_s) if state else None,
        eta_s=_finite(state.eta_s) if state and now_is in ("training", "stopping") else None,
        walltime_left_s=None if ends_at is None else max(0.0, ends_at - now),
        heartbeat_age_s=None if sign is None else max(0.0, now - sign),
        problem=_problem(records, now_is, now),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _problem(records: RunRecords, now_is: Standing, now: float) -> str | None:
    """What last went wrong. An attempt before the newest is named."""
    if records.unreadable:
        return f"{', '.join(records.unreadable)} cannot be read."
    if now_is == "complete":
        return None
    if records.newest is not None and records.chain.ended and records.newest.exit_kind not in _GOOD:
        why = _went_wrong(records.newest, is_running=False)
        return records.chain.ended if why in records.chain.ended else f"{why} {records.chain.ended}"
    for attempt in reversed(records.attempts):
        if why := _went_wrong(attempt, records.is_running(attempt, now)):
            return why if attempt is records.newest else f"attempt {attempt.attempt}: {why}"
    return records.chain.ended or None


def _went_wrong(attempt: AttemptRecord, is_running: bool) -> str:
    if attempt.exit_kind in _BAD:
        return attempt.why or f"It ended as {attempt.exit_kind} and does not say why."
    if attempt.exit_kind == "running" and not is_running:
        if attempt.was_killed_when_told_to_end:
            return f"{attempt.signalled} asked it to end, and it was killed before it had."
        return "It was killed before it could say why."
    if attempt.lost_nodes:
        return "Lost " + "; ".join(f"{node}: {why}" for node, why in attempt.lost_nodes.items())
    return f"Restarted in place: {attempt.restarts[-1]}" if attempt.restarts else ""
