"""What the scheduler says about runs, beside what their directories say. Only for who asks for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from hpc_grpo.config import LaunchConfig, load_launch
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place import queue_of
from hpc_grpo.launch.place.slurm.jobs import WAITING_STATES
from hpc_grpo.launch.place.slurm.queue import QueueAnswer, QueuedJob, ask, cache_path
from hpc_grpo.report.records import RunRecords
from hpc_grpo.report.summary import RunSummary
from hpc_grpo.report.words import UNKNOWN, moment

_NOT_STARTED = ("submitted", "waiting")


def ask_about(runs: Sequence[RunRecords]) -> QueueAnswer:
    """One question about the jobs of all `runs`, or the last answer. Raises LaunchError when Slurm has none."""
    job_ids = sorted({job_id for records in runs for job_id in jobs_of(records)})
    min_s = max(_min_s(records) for records in runs) if runs else LaunchConfig().scheduler_query_min_s
    return ask(job_ids, min_s, cache_path(os.environ))


def jobs_of(records: RunRecords) -> list[str]:
    """The jobs of a run that may still be there: of the attempt that has not ended, and those that wait."""
    found = []
    newest = records.newest
    if newest is not None and newest.exit_kind == "running" and queue_of(newest.source) is not None:
        found.append(newest.job_id)
    if records.waiting_job:
        found.append(records.waiting_job)
    if (link := records.unstarted_link) is not None and link.job_id not in found:
        found.append(link.job_id)
    return found


def told_of(records: RunRecords, answer: QueueAnswer) -> list[QueuedJob]:
    """What was said about the run's jobs; nothing of jobs that were not asked about."""
    told = (answer.job(job_id) for job_id in jobs_of(records))
    return [job for job in told if job is not None]


def in_words(told: Sequence[QueuedJob]) -> tuple[str, str]:
    """State and expected start, for a table."""
    states = [f"{job.job_id} {job.state}{f' ({job.reason})' if job.reason else ''}" for job in told]
    starts = [moment(job.starts_at) for job in told if job.state == "PENDING"]
    return ", ".join(states) or UNKNOWN, ", ".join(starts) or UNKNOWN


def as_values(told: Sequence[QueuedJob], answer: QueueAnswer) -> dict[str, Any]:
    """For JSON."""
    return {"asked_at": answer.asked_at, "jobs": [asdict(job) for job in told]}


def with_problem(summary: RunSummary, told: Sequence[QueuedJob]) -> RunSummary:
    """A run that waits for a job which is over says so: its own records cannot know."""
    waits = [job for job in told if job.job_id != summary.job_id or summary.attempt is None]
    if summary.state not in _NOT_STARTED or not waits or any(job.state in WAITING_STATES for job in waits):
        return summary
    ended = ", ".join(f"{job.job_id} ({job.state})" for job in waits)
    return replace(
        summary,
        problem=f"Its job will not start, Slurm says: {ended}. Hand it in again: hpc-grpo resume {summary.run}",
    )


def _min_s(records: RunRecords) -> float:
    try:
        return load_launch(str(records.run.config)).scheduler_query_min_s
    except ConfigError:
        return LaunchConfig().scheduler_query_min_s
