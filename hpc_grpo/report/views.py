"""Summaries of runs as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpc_grpo.report.summary import RunSummary
from hpc_grpo.report.words import UNKNOWN, decimal, duration, moment, one_line, share, short, table

_NARROWEST_PROBLEM = 30
_TITLES = (
    "run",
    "state",
    "attempt",
    "step",
    "reward",
    "tokens/s",
    "ETA",
    "walltime left",
    "heartbeat",
    "last problem",
)
_QUEUE_TITLES = ("Slurm", "estimated start")


def status_table(
    summaries: Sequence[RunSummary], width: int | None = None, queue: Sequence[tuple[str, str]] | None = None
) -> str:
    """One line per run; the last problem is cut to fit `width` characters.

    `queue` has what Slurm says of each run's jobs, and when it expects to start them.
    """
    titles, rows = list(_TITLES), [_cells(summary) for summary in summaries]
    if queue is not None:
        titles[-1:-1] = _QUEUE_TITLES
        for row, told in zip(rows, queue, strict=True):
            row[-1:-1] = told
    text = table(titles, rows)
    if width is None or not rows:
        return text
    left = max(_NARROWEST_PROBLEM, width - text.splitlines()[0].index(titles[-1]))
    return table(titles, [[*row[:-1], one_line(row[-1], left)] for row in rows])


def list_table(summaries: Sequence[RunSummary]) -> str:
    rows = [[summary.run, moment(summary.created_at), summary.state] for summary in summaries]
    return table(("run", "created", "state"), rows)


def as_json(summaries: Sequence[RunSummary], queue: Sequence[dict[str, Any]] | None = None) -> str:
    """A list with one object per run: the fields of RunSummary, null where unknown; with `queue`, `slurm` too."""
    entries = [asdict(summary) for summary in summaries]
    for entry, told in zip(entries, queue or (), strict=queue is not None):
        entry["slurm"] = told
    return json.dumps(entries, indent=2, allow_nan=False)


def card(summary: RunSummary) -> list[str]:
    """One run in a few lines, for `watch`."""
    numbers = _cells(summary)
    first = "  ".join(f"{title} {value}" for title, value in zip(_TITLES[2:4], numbers[2:4], strict=True))
    rest = "  ".join(f"{title} {value}" for title, value in zip(_TITLES[4:9], numbers[4:9], strict=True))
    lines = [f"{summary.run}: {summary.state}  {first}", rest]
    return lines if summary.problem is None else [*lines, f"last problem: {one_line(summary.problem)}"]


def _cells(summary: RunSummary) -> list[str]:
    return [
        summary.run,
        summary.state,
        UNKNOWN if summary.attempt is None else str(summary.attempt),
        share(summary.step, summary.total_steps),
        decimal(summary.reward),
        short(summary.tokens_per_s),
        duration(summary.eta_s),
        duration(summary.walltime_left_s),
        duration(summary.heartbeat_age_s),
        one_line(summary.problem),
    ]
