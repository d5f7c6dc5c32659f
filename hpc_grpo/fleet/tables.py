"""Tables of VMs, jobs and attempts, as text or as a table that redraws."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpc_grpo.fleet.db import Database, DatabaseAwayError
from hpc_grpo.fleet.jobs import count_jobs, list_jobs, list_vms
from hpc_grpo.fleet.states import JobState
from hpc_grpo.system.readable import UNKNOWN, duration, moment, one_line, printable, table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_REFRESH_S = 2.0
_REASON = 60
_SHOWN_JOBS = 40
_VM_TITLES = ("vm", "state", "gpus", "free", "jobs", "busy", "seen", "error")
_JOB_TITLES = ("job", "state", "attempt", "retries", "vm", "gpus", "for", "reason")
_COLOURS = {
    "running": "green",
    "ready": "green",
    "completed": "blue",
    "failed": "red",
    "lost": "red",
    "stale": "yellow",
}


def vm_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of VMs: `free` GPUs may be claimed by a job, `busy` ones are used by other processes."""
    return table(_VM_TITLES, [_vm_cells(row) for row in rows])


def job_table(rows: Sequence[Mapping[str, Any]], now: float) -> str:
    """Return a table of jobs; `for` is how long each has been in its state."""
    return table(_JOB_TITLES, [_job_cells(row, now) for row in rows])


def attempt_table(rows: Sequence[Mapping[Any, Any]]) -> str:
    cells = [
        (
            str(row["attempt"]),
            one_line(row["vm"]),
            _indices(row["gpus"]),
            moment(row["claimed_at"]),
            duration(None if row["ended_at"] is None else row["ended_at"] - row["claimed_at"]),
            row["outcome"] or UNKNOWN,
            UNKNOWN if row["exit_code"] is None else str(row["exit_code"]),
            one_line(row["reason"] or UNKNOWN),
        )
        for row in rows
    ]
    return table(("attempt", "vm", "gpus", "claimed", "took", "ended as", "code", "reason"), cells)


def counts_line(counts: Mapping[str, int]) -> str:
    """Return how many jobs are in each state that has any."""
    return ", ".join(f"{number:,} {state}" for state, number in counts.items() if number) or "no jobs"


def watch(db: Database, console: Console) -> None:
    """Redraw the fleet on a terminal, in place, until Ctrl+C. Waits while the database is away."""
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                live.update(picture(db, console.height), refresh=True)
            except DatabaseAwayError as error:
                live.update(printable(str(error)), refresh=True)
            time.sleep(_REFRESH_S)


def picture(db: Database, height: int) -> RenderableType:
    """Return the fleet as a rich renderable: counts of jobs, the VMs, and running, waiting and ended jobs.

    Of each kind, the jobs submitted last come first, as many as fit on the terminal.
    """
    from rich.console import Group

    now = time.time()
    machines = [_vm_cells(row) for row in list_vms(db)]
    room = max(5, min(_SHOWN_JOBS, height - len(machines) - 8))
    live = list_jobs(db, (JobState.RUNNING,), room)
    over = list_jobs(db, (JobState.FAILED, JobState.COMPLETED, JobState.CANCELLED), room // 3)
    waiting = list_jobs(db, (JobState.QUEUED, JobState.PENDING), room)
    shown = [*live, *waiting][: room - len(over)]
    rows = [_job_cells(row, now) for row in [*shown, *over]]
    return Group(counts_line(count_jobs(db)), _drawn(_VM_TITLES, machines), _drawn(_JOB_TITLES, rows))


def _drawn(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*titles, box=None, header_style="bold")
    for row in rows:
        drawn.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    return drawn


def _vm_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    state = "drained" if row["is_drained"] and row["state"] == "ready" else row["state"]
    numbers = (str(row["gpus"]), str(row["available_gpus"]), str(row["claimed"]), str(row["busy"]))
    name = one_line(row["name"] or row["ip_address"])
    return (name, state, *numbers, duration(row["seen_s"]), one_line(row["error"] or UNKNOWN, _REASON))


def _job_cells(row: Mapping[str, Any], now: float) -> tuple[str, ...]:
    state = row["state"]
    if state == JobState.RUNNING and row["started_at"] is None:
        state = "starting"
    if state == JobState.FAILED and row["retry_at"] is not None:
        state = f"failed, again in {duration(row['retry_at'] - now)}"
    return (
        one_line(row["job_id"], _REASON),
        "cancelling" if row["status"] == JobState.RUNNING and row["is_cancelled"] else state,
        str(row["attempt"]),
        str(row["retry_count"]),
        one_line(row["vm"]) if row["status"] == JobState.RUNNING else UNKNOWN,
        _indices(row["gpus"]) if row["status"] == JobState.RUNNING else str(row["num_gpus"]),
        duration(now - row["changed_at"]) if row["changed_at"] else UNKNOWN,
        one_line(row["failure_reason"] or UNKNOWN, _REASON),
    )


def _indices(text: str | None) -> str:
    return ",".join(str(index) for index in json.loads(text)) if text else UNKNOWN
