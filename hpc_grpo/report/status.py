"""Derive the status of a run from its records, and show it as a table, a card or JSON."""

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
    "new", "submitted", "starting", "training", "stopping", "waiting", "stopped", "complete", "failed", "cancelled",
    "lost",
]  # fmt: skip
"""`submitted`: no attempt of the newest job yet. `starting`: an attempt runs, no step of it has ended.
`waiting`: the chain's next job is to continue. `lost`: recorded as running, without a sign of life."""

_OVER: tuple[RunStatus, ...] = ("complete", "failed", "stopped", "cancelled")
_RUNNING: tuple[RunStatus, ...] = ("starting", "training", "stopping")

_CONTINUED = ("running", "resumable", "crash", "node_lost", "bringup_failed")
"""Exit kinds after which the next job of a chain continues; `running` is the record of an attempt that was killed."""

_STOPPED = ("resumable", "stopped", "complete")
"""Exit kinds after which a run without a further job is stopped; `complete` without COMPLETE: it was extended since."""

_WENT_WRONG = ("config", "crash", "cancelled", "bringup_failed", "node_lost")
_WENT_WELL = ("complete", "stopped")

_NARROWEST_PROBLEM = 30
_TITLES = ("run", "state", "attempt", "step", "reward", "tokens/s", "ETA", "walltime left", "heartbeat", "last problem")
_QUEUE_TITLES = ("Slurm", "estimated start")


@dataclass(frozen=True)
class RunSummary:
    """What `status`, `list` and `watch` show of a run; unknown values are None.

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

    def card(self) -> list[str]:
        """Return the lines that `watch` shows of the run."""
        labelled = [f"{title} {value}" for title, value in zip(_TITLES, self.cells(), strict=True)]
        lines = [f"{self.run}: {self.state}  {'  '.join(labelled[2:4])}", "  ".join(labelled[4:9])]
        return lines if self.problem is None else [*lines, f"last problem: {one_line(self.problem)}"]

    def cells(self) -> list[str]:
        """Return the values under _TITLES."""
        return [
            self.run,
            self.state,
            UNKNOWN if self.attempt is None else str(self.attempt),
            fraction(self.step, self.total_steps),
            decimal(self.reward),
            short_number(self.tokens_per_s),
            *map(duration, (self.eta_s, self.walltime_left_s, self.heartbeat_age_s)),
            one_line(self.problem or self.slow_node),
        ]


def run_status(records: RunRecords, now: float) -> RunStatus:
    """Return the status of a run at `now`, in unix seconds."""
    if records.is_complete:
        return "complete"
    newest, owner = records.newest, records.owner if records.is_held(now) else None
    # An attempt takes the lock before its record is written, and gives it up after.
    if owner and (newest is None or owner.attempt > newest.attempt or newest.exit_kind == "running"):
        state = records.state
        if records.stop_asked:
            return "stopping"
        if state is None or state.attempt != owner.attempt or state.phase == "starting":
            return "starting"
        return "stopping" if state.phase == "stopped" else "training"
    if records.stop_asked:
        return "cancelled" if newest is not None and _was_cancelled(records, newest) else "stopped"
    if newest is not None and records.waiting_job:
        at_limit = newest.exit_kind == "cancelled" and ended_by_time_limit(newest, None)
        if newest.exit_kind in _CONTINUED or at_limit:
            return "waiting"
    if (link := records.unstarted_link) is not None and link.job_id != records.waiting_job:
        return "submitted"
    if newest is None:
        return "submitted" if records.unstarted_link else "new"
    if newest.exit_kind == "running" and not records.chain.ended:
        return "lost"
    if _was_cancelled(records, newest):
        return "cancelled"
    return "stopped" if newest.exit_kind in _STOPPED else "failed"


def is_over(records: RunRecords, now: float) -> bool:
    """Return True if the run will not change until the user acts."""
    return run_status(records, now) in _OVER and not records.is_held(now)


def summarize(records: RunRecords, now: float) -> RunSummary:
    """Sum the run up at `now`, in unix seconds."""
    status, newest, state = run_status(records, now), records.newest, records.state
    link, trains = records.unstarted_link, status in ("training", "stopping")
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
        eta_s=_finite(state.eta_s) if state and trains else None,
        walltime_left_s=None if ends_at is None else max(0.0, ends_at - now),
        heartbeat_age_s=None if sign is None else max(0.0, now - sign),
        problem=_problem(records, status, now),
        slow_node=(state.slow_node or None) if state and trains else None,
    )


def status_table(
    summaries: Sequence[RunSummary], width: int | None = None, queue: Sequence[tuple[str, str]] | None = None
) -> str:
    """Return one line per run; the last problem is cut to fit `width` characters.

    `queue` has what the scheduler says of each run's jobs, and when it expects to start them.
    """
    titles, rows = list(_TITLES), [summary.cells() for summary in summaries]
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


def _was_cancelled(records: RunRecords, newest: AttemptRecord) -> bool:
    if newest.was_killed_in_teardown:
        return not ended_by_time_limit(newest, records.last_sign_of_life())
    return newest.exit_kind == "cancelled"


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _problem(records: RunRecords, status: RunStatus, now: float) -> str | None:
    """Say what last went wrong; an attempt before the newest is named."""
    ended, newest = records.chain.ended, records.newest
    if records.unreadable:
        return f"{', '.join(records.unreadable)} cannot be read."
    if status == "complete":
        return None
    if early_death := records.early_death(now):
        return early_death
    if newest is not None and ended and newest.exit_kind not in _WENT_WELL:
        why = _what_went_wrong(newest, is_running=False)
        return ended if why in ended else f"{why} {ended}"
    for attempt in reversed(records.attempts):
        if why := _what_went_wrong(attempt, records.is_running(attempt, now)):
            return why if attempt is newest else f"attempt {attempt.attempt}: {why}"
    return ended or None


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
