"""Read the small files of a run directory once, derive the run's status, and show it as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Literal, TypeVar

from hpc_grpo.metrics.record import phase_name
from hpc_grpo.run.attempt import NEAR_THE_LIMIT_S, AttemptRecord, read_attempts
from hpc_grpo.run.chain import ChainRecord, Link, before_it_ran, read_chain
from hpc_grpo.run.files import is_damaged, read_record
from hpc_grpo.run.lock import LockOwner, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import RunState, read_state
from hpc_grpo.system.readable import UNKNOWN, decimal, duration, finite_or_none, fraction, one_line, short_number, table

T = TypeVar("T")

RunStatus = Literal[
    "new", "submitted", "starting", "training", "stopping", "waiting", "stopped", "complete", "failed", "cancelled",
    "lost",
]  # fmt: skip
"""`submitted`: no attempt of the newest job yet. `starting`: an attempt runs, but none of its steps has ended.
`waiting`: the chain's next job will resume. `lost`: recorded as running, but without a sign of life."""

_OVER: tuple[RunStatus, ...] = ("complete", "failed", "stopped", "cancelled")
_RUNNING: tuple[RunStatus, ...] = ("starting", "training", "stopping")

_CONTINUED = ("running", "resumable", "crash", "node_lost", "bringup_failed")
"""Exit kinds after which the next job of a chain continues; `running` is the record of an attempt that was killed."""

_STOPPED = ("resumable", "stopped", "complete")
"""Exit kinds after which a run without a further job is stopped. `complete` without COMPLETE: the run was extended."""

_WENT_WRONG = ("config", "crash", "cancelled", "bringup_failed", "node_lost")
_WENT_WELL = ("complete", "stopped")

_NARROWEST_PROBLEM = 30
TITLES = ("run", "state", "attempt", "step", "reward", "tokens/s", "ETA", "walltime left", "heartbeat", "last problem")
_QUEUE_TITLES = ("Slurm", "estimated start")

SILENT_S = 60.0
"""A supervisor beats every 5 s. After this much silence it counts as dead."""
_SET_UP_S = 600.0
"""The modules and set-up lines of a job take less than this."""


@dataclass(frozen=True)
class RunRecords:
    """The contents of one run's files.

    `owner` is the attempt that holds the run; `attempts` are in order; `created_at` is in unix seconds; `unreadable`
    names files that exist but are damaged.
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
        """The job that will resume after the newest attempt and has not started; "" if there is none."""
        return "" if self.chain.successor in self._attempted_jobs else self.chain.successor

    @property
    def unstarted_links(self) -> list[Link]:
        """The jobs of the chain that have no attempt yet but may still get one, in order."""
        links = () if self.chain.ended else self.chain.since_the_user()
        return [*takewhile(lambda link: link.job_id not in self._attempted_jobs, reversed(links))][::-1]

    @property
    def unstarted_link(self) -> Link | None:
        return next(iter(self.unstarted_links), None)

    @property
    def _attempted_jobs(self) -> set[str]:
        return {attempt.job_id for attempt in self.attempts}

    def early_death(self, now: float) -> str:
        """Return a line about a job that began long ago, after the newest attempt, and left no attempt; "" if none did.

        In an ended chain, the last job that began does not count: it ran, and recorded why nothing follows.
        """
        links = takewhile(lambda link: link.job_id not in self._attempted_jobs, reversed(self.chain.links))
        begun = [link.job_id for link in links if self.run.job_mark(link.job_id).exists()]
        for job_id in begun[1:] if self.chain.ended else begun:
            if now - self.run.job_mark(job_id).stat().st_mtime > _SET_UP_S:
                return f"Job {job_id}: {before_it_ran(self.run, job_id)}"
        return ""

    def job_output(self, job_id: str) -> Path:
        """Return the file with the output of the scheduler and the supervisor of a job.

        A job that the user's own script submitted writes elsewhere, and records the file when it starts.
        """
        link, path = self.chain.link(job_id), self.run.slurm_log(job_id)
        return Path(link.output) if link is not None and link.output and not path.exists() else path

    def is_held(self, now: float) -> bool:
        """Return whether a supervisor works on the run; `now` is in unix seconds."""
        return self.owner is not None and now - self.owner.beat_at <= SILENT_S

    def is_running(self, attempt: AttemptRecord, now: float) -> bool:
        """Return whether this attempt is running. The record alone would not show that it was killed."""
        is_newest = self.newest is not None and attempt.attempt == self.newest.attempt
        return attempt.exit_kind == "running" and is_newest and self.is_held(now)

    def start_command(self, attempt: AttemptRecord | None, name: str) -> str:
        """Return the command that starts the run `name` again as this attempt was started; None: it has no attempt."""
        if self.chain.links and (attempt is None or attempt.source == "slurm"):
            return f"hpc-grpo submit {name}"
        return "the command that started it" if attempt and attempt.source == "joined" else f"hpc-grpo train {name}"

    def last_sign_of_life(self) -> float | None:
        """Return the unix time of the newest attempt's last beat or finished step; None if it left neither."""
        if self.newest is None:
            return None
        beat = (self.owner.attempt, self.owner.beat_at) if self.owner else (0, 0.0)
        step = (self.state.attempt, self.state.heartbeat) if self.state else (0, 0.0)
        return max((at for attempt, at in (beat, step) if attempt == self.newest.attempt), default=None)


def read_records(run: RunDir) -> RunRecords:
    """Read the records of a run. A damaged file is listed in `unreadable`, so that other runs are still shown."""
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
    """Return whether an attempt ended with its allocation; `last_sign` (unix s) replaces an unrecorded end."""
    end = next((at for at in (attempt.ended_at, attempt.signalled_at, last_sign) if at is not None), None)
    return attempt.ends_at is not None and end is not None and end >= attempt.ends_at - NEAR_THE_LIMIT_S


@dataclass(frozen=True)
class RunSummary:
    """The fields of a run in `status` and `watch`; unknown values are None.

    A field ending in `_s` is in seconds, `_at` in unix seconds. `step` of `total_steps` have ended. `walltime_left_s`
    is for the running attempt's allocation, `heartbeat_age_s` is the time since its supervisor's last sign of life.
    `problem` is a sentence about what last went wrong, `slow_node` about a node that holds up a run that trains.
    `doing` is the driver's current phase, `doing_s` its duration so far. `in_step` says how much of the current step is
    done. `on_step` says why `train.on_step` ended the run, or is off.
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
    doing: str | None = None
    doing_s: float | None = None
    problem: str | None = None
    slow_node: str | None = None
    in_step: str | None = None
    on_step: str | None = None

    def cells(self) -> list[str]:
        """Return the values under TITLES."""
        return [
            self.run,
            self.state,
            UNKNOWN if self.attempt is None else str(self.attempt),
            fraction(self.step, self.total_steps),
            decimal(self.reward),
            short_number(self.tokens_per_s),
            *map(duration, (self.eta_s, self.walltime_left_s, self.heartbeat_age_s)),
            one_line(self.problem or self.slow_node or self.on_step),
        ]


def run_status(records: RunRecords, now: float) -> RunStatus:
    """Return the status of a run at `now`, in unix seconds."""
    if records.is_complete:
        return "complete"
    newest, owner = records.newest, records.owner if records.is_held(now) else None
    # An attempt takes the lock before its record is written, and releases it afterwards.
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
    """Summarise the run at `now`, in unix seconds."""
    status, newest, state = run_status(records, now), records.newest, records.state
    link, trains = records.unstarted_link, status in ("training", "stopping")
    ends_at = newest.ends_at if newest is not None and status in _RUNNING else None
    sign = records.last_sign_of_life() if status in (*_RUNNING, "lost") else None
    works = records.owner if status in _RUNNING and records.is_held(now) else None
    return RunSummary(
        run=records.run.name,
        path=str(records.run.path),
        state=status,
        created_at=records.created_at,
        attempt=newest.attempt if newest else None,
        job_id=newest.job_id if newest else link.job_id if link else None,
        step=state.step if state else None,
        total_steps=state.total_steps if state else None,
        reward=finite_or_none(state.reward) if state else None,
        tokens_per_s=finite_or_none(state.tokens_per_s) if state else None,
        eta_s=finite_or_none(state.eta_s) if state and trains else None,
        walltime_left_s=None if ends_at is None else max(0.0, ends_at - now),
        heartbeat_age_s=None if sign is None else max(0.0, now - sign),
        doing=(phase_name(works.work) or ("starting" if status == "starting" else None)) if works else None,
        doing_s=max(0.0, now - works.work_at) if works and works.work_at else None,
        problem=_problem(records, status, now),
        slow_node=(state.slow_node or None) if state and trains else None,
        in_step=_in_step(state) if state and trains else None,
        on_step=(state.on_step or None) if state else None,
    )


def status_table(
    summaries: Sequence[RunSummary], width: int | None = None, queue: Sequence[tuple[str, str]] | None = None
) -> str:
    """Return one line per run; the last problem is cut to fit `width` characters.

    `queue` has the scheduler's states of each run's jobs, and their expected starts.
    """
    titles, rows = list(TITLES), [summary.cells() for summary in summaries]
    if queue is not None:
        titles[-1:-1] = _QUEUE_TITLES
        for row, cells in zip(rows, queue, strict=True):
            row[-1:-1] = cells
    text = table(titles, rows)
    if width is None or not rows:
        return text
    left = max(_NARROWEST_PROBLEM, width - text.splitlines()[0].index(titles[-1]))
    return table(titles, [[*row[:-1], one_line(row[-1], left)] for row in rows])


def _in_step(state: RunState) -> str | None:
    if state.num_microbatches:
        return f"step {state.step + 1}: {state.trained} of {state.num_microbatches} microbatches trained"
    if not state.num_groups:
        return None
    what = f"step {state.step + 1}, {state.waits_for}"
    if state.graded == state.num_groups:
        return f"{what}: all groups graded ({state.num_groups})"
    return f"{what}: {state.sampled} of {state.num_groups} groups sampled, {state.graded} graded"


def _was_cancelled(records: RunRecords, newest: AttemptRecord) -> bool:
    if newest.was_killed_in_teardown:
        return not ended_by_time_limit(newest, records.last_sign_of_life())
    return newest.exit_kind == "cancelled"


def _problem(records: RunRecords, status: RunStatus, now: float) -> str | None:
    """Return the last problem. The text names the attempt if it is not the newest."""
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
    """Return the problem of an attempt; "" if there was none."""
    if attempt.exit_kind in _WENT_WRONG:
        return attempt.why or f"It ended as {attempt.exit_kind} and does not say why."
    if attempt.exit_kind == "running" and not is_running:
        if attempt.was_killed_in_teardown:
            return f"{attempt.signalled} asked it to end, and it was killed before it had ended."
        return "It was killed before it could say why."
    if attempt.lost_nodes:
        return "Lost " + "; ".join(f"{node}: {why}" for node, why in attempt.lost_nodes.items())
    return f"Restarted in place: {attempt.restarts[-1]}" if attempt.restarts else ""
