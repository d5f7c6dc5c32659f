"""Combine the scheduler's answer about runs' jobs with the runs' directories, for `status --slurm`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_grpo.launch.place import queue_of
from hpc_grpo.launch.place.slurm.queue import QueueAnswer, QueuedJob, cache_path, queue_answer
from hpc_grpo.report.status import RunRecords, RunSummary
from hpc_grpo.system.readable import UNKNOWN, duration, moment


@dataclass(frozen=True)
class QueueReport:
    """The scheduler's answer, and the jobs that it knows for each run, in the order of the runs."""

    answer: QueueAnswer
    jobs: tuple[tuple[QueuedJob, ...], ...]

    def cells(self) -> list[tuple[str, str]]:
        """Return the states of each run's jobs, and the expected start of waiting jobs."""
        return [
            (
                ", ".join(f"{job.job_id} {job.state}{f' ({job.reason})' if job.reason else ''}" for job in jobs)
                or UNKNOWN,
                ", ".join(moment(job.starts_at) for job in jobs if job.state == "PENDING") or UNKNOWN,
            )
            for jobs in self.jobs
        ]

    def values(self) -> list[dict[str, Any]]:
        return [{"asked_at": self.answer.asked_at, "jobs": [asdict(job) for job in jobs]} for jobs in self.jobs]

    def age(self, now: float) -> str:
        """Return how old the answer is at `now`, in unix seconds."""
        if not self.answer.jobs:
            return "No job to ask about."
        return f"Slurm was asked {duration(now - self.answer.asked_at)} ago."

    def corrected(self, summaries: Sequence[RunSummary]) -> list[RunSummary]:
        """Return the summaries, with a problem for each run that waits for an ended job: no record shows this."""
        found = []
        for summary, jobs in zip(summaries, self.jobs, strict=True):
            waits = [job for job in jobs if job.job_id != summary.job_id or summary.attempt is None]
            if summary.state in ("submitted", "waiting") and waits and all(job.is_over for job in waits):
                ended = ", ".join(f"{job.job_id} ({job.state})" for job in waits)
                problem = f"Its job will not start, Slurm says: {ended}. Submit it again: hpc-grpo submit {summary.run}"
                summary = replace(summary, problem=problem)
            found.append(summary)
        return found


def ask_about(runs: Sequence[RunRecords]) -> QueueReport:
    """Ask once about the jobs of all `runs`, or use the last answer. Raises LaunchError if there is none."""
    jobs_of_runs = [_unfinished_jobs(records) for records in runs]
    job_ids = sorted({job_id for jobs in jobs_of_runs for job_id in jobs})
    answer = queue_answer(job_ids, cache_path(os.environ))
    return QueueReport(answer, tuple(tuple(filter(None, map(answer.jobs.get, jobs))) for jobs in jobs_of_runs))


def _unfinished_jobs(records: RunRecords) -> list[str]:
    """Return the jobs of a run that may still exist: the job of a running attempt, and waiting jobs."""
    newest = records.newest
    runs = newest is not None and newest.exit_kind == "running" and queue_of(newest.source) is not None
    found = [newest.job_id if newest and runs else "", records.waiting_job]
    found += [link.job_id for link in records.unstarted_links]
    return list(dict.fromkeys(filter(None, found)))
