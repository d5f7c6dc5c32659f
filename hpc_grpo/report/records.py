"""Read the small files of a run directory once: every view of a run is made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from hpc_grpo.run.attempt import NEAR_THE_LIMIT_S, AttemptRecord, read_attempts
from hpc_grpo.run.chain import ChainRecord, Link, before_it_ran, read_chain
from hpc_grpo.run.files import is_damaged, read_record
from hpc_grpo.run.lock import LockOwner, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import RunState, read_state

SILENT_S = 60.0
"""A supervisor beats every 5 s; after so long a silence it counts as dead."""
_SET_UP_S = 600.0
"""Longer than modules and set-up lines of a job take."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunRecords:
    """What the files of one run say.

    `owner` is the attempt that holds the run; `attempts` are in order; `created_at` is in unix seconds; `unreadable`
    names files that are there but damaged.
    """

    run: RunDir
    is_complete: bool
    stop_asked: bool
    owner: LockOwner | None
    attempts: tuple[AttemptRecord, ...]
    chain: ChainRecord
    state: RunState | None
    created_at: float | None
    unreadable: tuple[str, ...] = ()

    @property
    def newest(self) -> AttemptRecord | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def waiting_job(self) -> str:
        """The job that continues after the newest attempt and has not started, "" if there is none."""
        return "" if self.chain.successor in self._attempted_jobs else self.chain.successor

    @property
    def unstarted_link(self) -> Link | None:
        """The last job of the chain, if it has no attempt and one may still come."""
        last = self.chain.links[-1] if self.chain.links and not self.chain.ended else None
        return None if last is None or last.job_id in self._attempted_jobs else last

    @property
    def _attempted_jobs(self) -> set[str]:
        return {attempt.job_id for attempt in self.attempts}

    def early_death(self, now: float) -> str:
        """Say which job since the newest attempt began long ago and left none, "" if none did.

        The last job that began of a chain that has ended is not such a job: it ran, and said why nothing follows.
        """
        links = takewhile(lambda link: link.job_id not in self._attempted_jobs, reversed(self.chain.links))
        begun = [link.job_id for link in links if self.run.job_mark(link.job_id).exists()]
        for job_id in begun[1:] if self.chain.ended else begun:
            if now - self.run.job_mark(job_id).stat().st_mtime > _SET_UP_S:
                return f"Job {job_id}: {before_it_ran(self.run, job_id)}"
        return ""

    def job_output(self, job_id: str) -> Path:
        """Return the file with what the scheduler and the supervisor printed in a job.

        A job that the user's own script submitted writes elsewhere, and says where when it starts.
        """
        link, path = self.chain.link(job_id), self.run.slurm_log(job_id)
        return Path(link.output) if link is not None and link.output and not path.exists() else path

    def is_held(self, now: float) -> bool:
        """Tell whether a supervisor works on the run; `now` is in unix seconds."""
        return self.owner is not None and now - self.owner.beat_at <= SILENT_S

    def is_running(self, attempt: AttemptRecord, now: float) -> bool:
        """Tell whether this attempt is not over: its record alone cannot say that it was killed."""
        is_newest = self.newest is not None and attempt.attempt == self.newest.attempt
        return attempt.exit_kind == "running" and is_newest and self.is_held(now)

    def last_sign_of_life(self) -> float | None:
        """Return the unix time of the newest attempt's last beat or finished step; None if it left neither."""
        if self.newest is None:
            return None
        beat = (self.owner.attempt, self.owner.beat_at) if self.owner else (0, 0.0)
        step = (self.state.attempt, self.state.heartbeat) if self.state else (0, 0.0)
        return max((at for attempt, at in (beat, step) if attempt == self.newest.attempt), default=None)


def read_records(run: RunDir) -> RunRecords:
    """Read the records of a run; a damaged file is named in `unreadable`, so that it hides no other run."""
    unreadable: list[str] = []

    def guarded(path: Path, read: Callable[[RunDir], T], default: T) -> T:
        try:
            if is_damaged(path):
                unreadable.append(path.name)
            return read(run)
        except OSError:
            unreadable.append(path.name)
            return default

    return RunRecords(
        run=run,
        is_complete=run.is_complete(),
        stop_asked=run.stop_marker.exists(),
        owner=guarded(run.holder, read_lock_owner, None),
        attempts=tuple(read_attempts(run)),
        chain=guarded(run.chain, read_chain, ChainRecord()),
        state=guarded(run.state, read_state, None),
        created_at=guarded(
            run.source, lambda run: read_record(run.source, lambda values: float(values["created_at"])), None
        ),
        unreadable=tuple(unreadable),
    )


def ended_by_time_limit(attempt: AttemptRecord, last_sign: float | None) -> bool:
    """Tell whether an attempt ended with its allocation; `last_sign` (unix s) stands in for an end not recorded."""
    end = next((at for at in (attempt.ended_at, attempt.signalled_at, last_sign) if at is not None), None)
    return attempt.ends_at is not None and end is not None and end >= attempt.ends_at - NEAR_THE_LIMIT_S
