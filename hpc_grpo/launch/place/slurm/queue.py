"""What the scheduler has to say about jobs, in one call for all of them, and not more often than a site allows."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.slurm.text import output_of, unix_time
from hpc_grpo.run.files import write_json_atomic

_UNKNOWN_JOB = "Invalid job id"
_FORMAT = "%i|%T|%S|%r"


@dataclass(frozen=True)
class QueuedJob:
    """`state` in Slurm's words; `starts_at`: when it did or is expected to start, in unix seconds, if Slurm says."""

    job_id: str
    state: str
    reason: str = ""
    starts_at: float | None = None


@dataclass(frozen=True)
class QueueAnswer:
    """What Slurm said at `asked_at` (unix seconds) about the jobs in `asked`; of those it has forgotten, nothing.

    `error` holds its words where it did not answer.
    """

    asked_at: float
    asked: tuple[str, ...] = ()
    jobs: Mapping[str, QueuedJob] = field(default_factory=dict)
    error: str = ""

    def job(self, job_id: str) -> QueuedJob | None:
        """None for a job that was not asked about; "GONE" is one that Slurm does not know (any more)."""
        if job_id not in self.asked:
            return None
        return self.jobs.get(job_id, QueuedJob(job_id, "GONE"))


def ask(job_ids: Sequence[str], min_s: float, cache: Path) -> QueueAnswer:
    """What Slurm says of these jobs, or said if somebody asked in the last `min_s` seconds: `cache` remembers.

    Without jobs nobody is asked. Raises LaunchError when Slurm does not answer, or did not the last time.
    """
    if not job_ids:
        return QueueAnswer(time.time())
    with _locked(cache):
        answer = _read(cache)
        if answer is None or not 0 <= time.time() - answer.asked_at < min_s:
            answer = _query(job_ids)
            write_json_atomic(cache, asdict(answer))
    if answer.error:
        age_s = time.time() - answer.asked_at
        raise LaunchError(f"{answer.error} (asked {age_s:.0f} s ago; asked again after {min_s:.0f} s)")
    return answer


def cache_path(environ: Mapping[str, str]) -> Path:
    """Below the user's cache folder: sites count the calls of a user, wherever the runs are."""
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "hpc-grpo" / "slurm_queue.json"


def _query(job_ids: Sequence[str]) -> QueueAnswer:
    now = time.time()
    command = ["squeue", "--noheader", f"--format={_FORMAT}", f"--jobs={','.join(job_ids)}", "--states=all"]
    # The user's own settings of squeue would filter jobs or print times in another form.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        printed = output_of(command, {**kept, "SLURM_TIME_FORMAT": "standard"})
    except LaunchError as error:
        if _UNKNOWN_JOB not in str(error):
            return QueueAnswer(now, error=str(error))
        printed = ""
    jobs = {job.job_id: job for job in map(_parse, printed.splitlines())}
    return QueueAnswer(now, tuple(job_ids), jobs)


def _parse(line: str) -> QueuedJob:
    job_id, state, start, reason = line.strip().split("|", 3)
    return QueuedJob(job_id, state, "" if reason == "None" else reason, unix_time(start))


def _read(cache: Path) -> QueueAnswer | None:
    try:
        values: dict[str, Any] = json.loads(cache.read_text())
        jobs = {job_id: QueuedJob(**job) for job_id, job in values.pop("jobs").items()}
        return QueueAnswer(**{**values, "asked": tuple(values["asked"])}, jobs=jobs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # none yet, or of another version


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """One at a time: who waits here finds the answer of who went first."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
        with cache.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise LaunchError(
            f"{cache.parent}, which says when Slurm was asked last, cannot be used ({error.strerror}); set "
            f"XDG_CACHE_HOME to a folder you can write to."
        ) from error
