"""Query squeue about jobs: one call for all of them, and not more often than a site allows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.slurm.text import OVER_STATES, output_of, unix_time
from hpc_grpo.run.files import write_json_atomic

_QUERY_MIN_S = 60.0  # Sites ask for at most one query a minute.
_LOCK_S = 120.0
"""Longer than squeue takes. Without flock, the lock file of a killed process stays forever."""


@dataclass(frozen=True)
class QueuedJob:
    """A job. `state` is Slurm's, or "GONE"; `starts_at` its actual or expected start in unix seconds."""

    job_id: str
    state: str
    reason: str = ""
    starts_at: float | None = None

    @property
    def is_over(self) -> bool:
        return self.state in OVER_STATES or self.state == "GONE"


@dataclass(frozen=True)
class QueueAnswer:
    """Slurm's answer at `asked_at` (unix seconds) about all jobs of a query. "GONE" is a job that Slurm has forgotten.

    `error` is Slurm's message if the query failed, "" otherwise.
    """

    asked_at: float
    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)
    error: str = ""


def queue_answer(job_ids: Sequence[str], cache: Path) -> QueueAnswer:
    """Query Slurm about jobs, or return its last answer from `cache` if that is less than a minute old.

    The cached answer may be about other jobs. Makes no query without jobs. Raises LaunchError if Slurm does not answer,
    or did not answer in the last minute.
    """
    if not job_ids:
        return QueueAnswer(time.time())
    from filelock import FileLock  # Imports asyncio, which only `status --slurm` should wait for.

    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        # One at a time: a process that waits here finds the answer of the first.
        with FileLock(cache.with_suffix(".lock"), timeout=_LOCK_S):
            answer = _read(cache)
            if answer is None or not 0 <= time.time() - answer.asked_at < _QUERY_MIN_S:
                answer = _query(job_ids)
                write_json_atomic(cache, asdict(answer))
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        raise LaunchError(
            f"The cache of Slurm's answers, {cache.parent}, cannot be used ({error}). Set XDG_CACHE_HOME to a "
            "folder on another disk where you can write."
        ) from error
    if answer.error:
        age_s = time.time() - answer.asked_at
        raise LaunchError(f"{answer.error} (asked {age_s:.0f} s ago; asked again after {_QUERY_MIN_S:.0f} s)")
    return answer


def cache_path(environ: Mapping[str, str]) -> Path:
    """Return the path of the last answer. The cache is the user's, not a run's, because sites count a user's calls."""
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "hpc-grpo" / "slurm_queue.json"


def _query(job_ids: Sequence[str]) -> QueueAnswer:
    now = time.time()
    command = ["squeue", "--noheader", "--array", "--format=%i|%T|%S|%r", f"--jobs={','.join(job_ids)}", "--states=all"]
    try:
        printed = output_of(command)
    except LaunchError as error:
        if "Invalid job id" not in str(error):
            return QueueAnswer(now, error=str(error))
        printed = ""
    jobs = {job_id: QueuedJob(job_id, "GONE") for job_id in job_ids}
    for line in (each for each in printed.splitlines() if each.count("|") > 2):  # a site's wrapper may print others
        job_id, state, start, reason = line.strip().split("|", 3)
        jobs[job_id] = QueuedJob(job_id, state, "" if reason == "None" else reason, unix_time(start))
    return QueueAnswer(now, jobs)


def _read(cache: Path) -> QueueAnswer | None:
    try:
        return TypeAdapter(QueueAnswer).validate_json(cache.read_bytes())
    except (OSError, ValueError):
        return None  # none yet, or of another version
