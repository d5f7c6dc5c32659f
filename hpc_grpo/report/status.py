"""Derive where a run stands from its records, and show it as a table, a card or JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpc_grpo.report.records import RunRecords, ended_by_time_limit
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.system.readable import UNKNOWN, decimal, duration, fraction, moment, one_line, short_number, table

RunStatus = Literal[
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
`waiting`: the chain's next job is to carry on. `lost`: recorded as running, without a sign of life."""

_OVER: tuple[RunStatus, ...] = ("complete", "failed", "stopped", "cancelled")
_RUNNING: tuple[RunStatus, ...] = ("starting", "training", "stopping")

_CARRIED_ON = ("running", "resumable", "crash", "node_lost", "bringup_failed")
"""Exit kinds after which the next job of a chain carries on; `running` is the record of an attempt that was killed."""

_AFTER: dict[str, RunStatus] = {
    "resumable": "stopped",
    "stopped": "stopped",
    "complete": "stopped",  # without COMPLETE: the run was extended since
}
"""An attempt that ended so leaves the run so without a further job; after any other exit kind it has failed."""

_WENT_WRONG = ("config", "crash", "cancelled", "bringup_failed", "node_lost")
_WENT_WELL = ("complete", "stopped")

_NARROWEST_PROBLEM = 30
_TITLES = ("run", "state", "attempt", "step", "reward", "tokens/s", "ETA", "walltime left", "heartbeat", "last problem")
_QUEUE_TITLES = ("Slurm", "estimated start")


@dataclass(frozen=True)
class RunSummary:
    """Hold what `status`, `list` and `watch` show of a run; unknown values are None.

    A field ending in `_s` is in seconds, `_at` in unix seconds. `step` of `total_steps` have ended. `walltime_left_s`
    is that of the running attempt's allocation, `heartbeat_age_s` the time since its supervisor's last sign of life.
    `problem` is a sentence about what last went wrong, `slow_node` about a node that holds up a run that trains.
    """

    run: str
    path: str
    state: RunStatus
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
    slow_node: str | None = None


def run_status(records: RunRecords, now: float) -> RunStatus:
    """Return the status of a run at `now`, in unix seconds."""
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
    """Tell whether nothing more will happen in the run directory until the user does something."""
    return run_status(records, now) in _OVER and not records.is_held(now)


def summarize(records: RunRecords, now: float) -> RunSummary:
    """Sum the run up at `now`, in unix seconds."""
    status, newest, state = run_status(records, now), records.newest, records.state
    link = records.unstarted_link
    ends_at = newest.ends_at if newest is not None and status in _RUNNING else None
    sign = records.last_sign_of_life() if status in (*_RUNNING, "lost") else None
    return RunSummary(
        run=records.run.path.name,
        path=str(records.run.path),
        state=status,
        created_at=records.created_at,
        attempt=newest.attempt if newest else None,
        job_id=newest.job_id if newest else link.job_id if link else None,
        step=state.step if state else None,
        total_steps=state.total_steps if state else None,
        reward=_finite(state.reward) if state else None,
        tokens_per_s=_finite(state.tokens_per_s) if state else None,
        eta_s=_finite(state.eta_s) if state and status in ("training", "stopping") else None,
        walltime_left_s=None if ends_at is None else max(0.0, ends_at - now),
        heartbeat_age_s=None if sign is None else max(0.0, now - sign),
        problem=_problem(records, status, now),
        slow_node=(state.slow_node or None) if state and status in ("training", "stopping") else None,
    )


def status_table(
    summaries: Sequence[RunSummary], width: int | None = None, queue: Sequence[tuple[str, str]] | None = None
) -> str:
    """Return one line per run; the last problem is cut to fit `width` characters.

    `queue` has what the scheduler says of each run's jobs, and when it expects to start them.
    """
    titles, rows = list(_TITLES), [_cells(summary) for summary in summaries]
    if queue is not None:
        titles[-1:-1] = _QUEUE_TITLES
        for row, cells in zip(rows, queue, strict=True):
            row[-1:-1] = cells
    text = table(titles, rows)
    if width is None or not rows:
        return text
    left = max(_NARROWEST_PROBLEM, width - text.splitlines()[0].index(titles[-1]))
    return table(titles, [[*row[:-1], one_line(row[-1], left)] for row in rows])


def list_table(summaries: Sequence[RunSummary]) -> str:
    """Return one line per run: its name, when it was created, its status."""
    rows = [[summary.run, moment(summary.created_at), summary.state] for summary in summaries]
    return table(("run", "created", "state"), rows)


def status_json(summaries: Sequence[RunSummary], queue: Sequence[dict[str, Any]] | None = None) -> str:
    """Return a list of objects with the fields of RunSummary, null where unknown; with `queue`, `slurm` too."""
    entries = [asdict(summary) for summary in summaries]
    for entry, jobs in zip(entries, queue or (), strict=queue is not None):
        entry["slurm"] = jobs
    return json.dumps(entries, indent=2, allow_nan=False)


def card(summary: RunSummary) -> list[str]:
    """Return the lines that `watch` shows of one run."""
    labelled = [f"{title} {value}" for title, value in zip(_TITLES, _cells(summary), strict=True)]
    lines = [f"{summary.run}: {summary.state}  {'  '.join(labelled[2:4])}", "  ".join(labelled[4:9])]
    return lines if summary.problem is None else [*lines, f"last problem: {one_line(summary.problem)}"]


def _cells(summary: RunSummary) -> list[str]:
    """Return the values under _TITLES."""
    return [
        summary.run,
        summary.state,
        UNKNOWN if summary.attempt is None else str(summary.attempt),
        fraction(summary.step, summary.total_steps),
        decimal(summary.reward),
        short_number(summary.tokens_per_s),
        duration(summary.eta_s),
        duration(summary.walltime_left_s),
        duration(summary.heartbeat_age_s),
        one_line(summary.problem or summary.slow_node),
    ]


def _is_underway(records: RunRecords, newest: AttemptRecord) -> bool:
    """Tell whether the lock's attempt runs: it is taken before the attempt's record is written, and given up after."""
    assert records.owner is not None
    return records.owner.attempt > newest.attempt or newest.exit_kind == "running"


def _while_held(records: RunRecords) -> RunStatus:
    assert records.owner is not None
    if records.stop_asked:
        return "stopping"
    state = records.state
    if state is None or state.attempt != records.owner.attempt or state.phase == "starting":
        return "starting"
    return "stopping" if state.phase == "stopped" else "training"


def _was_cancelled(records: RunRecords, newest: AttemptRecord) -> bool:
    if newest.was_killed_in_teardown:
        return not ended_by_time_limit(newest, records.last_sign_of_life())
    return newest.exit_kind == "cancelled"


def _is_carried_on(newest: AttemptRecord) -> bool:
    at_limit = newest.exit_kind == "cancelled" and ended_by_time_limit(newest, None)
    return newest.exit_kind in _CARRIED_ON or at_limit


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _problem(records: RunRecords, status: RunStatus, now: float) -> str | None:
    """Say what last went wrong; an attempt before the newest is named."""
    if records.unreadable:
        return f"{', '.join(records.unreadable)} cannot be read."
    if status == "complete":
        return None
    if early_death := records.early_death(now):
        return early_death
    if records.newest is not None and records.chain.ended and records.newest.exit_kind not in _WENT_WELL:
        why = _what_went_wrong(records.newest, is_running=False)
        return records.chain.ended if why in records.chain.ended else f"{why} {records.chain.ended}"
    for attempt in reversed(records.attempts):
        if why := _what_went_wrong(attempt, records.is_running(attempt, now)):
            return why if attempt is records.newest else f"attempt {attempt.attempt}: {why}"
    return records.chain.ended or None


def _what_went_wrong(attempt: AttemptRecord, is_running: bool) -> str:
    """Say what went wrong in an attempt; "" if nothing did."""
    if attempt.exit_kind in _WENT_WRONG:
        return attempt.why or f"It ended as {attempt.exit_kind} and does not say why."
    if attempt.exit_kind == "running" and not is_running:
        if attempt.was_killed_in_teardown:
            return f"{attempt.signalled} asked it to end, and it was killed before it had."
        return "It was killed before it could say why."
    if attempt.lost_nodes:
        return "Lost " + "; ".join(f"{node}: {why}" for node, why in attempt.lost_nodes.items())
    return f"Restarted in place: {attempt.restarts[-1]}" if attempt.restarts else ""
