"""Decide what a job of a chain does and requests: pure functions of facts, in the order of the job's life.

A run is a chain of jobs; each job is a link. First, a link queues two follow-on jobs behind itself. The queue starts
the next job however the previous one ended, so walltime, out-of-memory kills and lost nodes are covered. If a link dies
before it can queue a job, for example on a bad node, one job still waits. A job's dependency cannot distinguish how the
previous job ended. This module decides that; `ChainLink` (link.py) gathers the facts and carries out the decisions.

    what happens                     the attempt's end     the successor                    the user hears
    -------------------------------  --------------------  -------------------------------  --------------------------
    the driver crashes for good      crash                 waits, queued again if needed    retrying, from this link
    a node is lost                   node_lost             the same, and avoids the node    retrying, from this link
    the queue ends the job for it    node_lost, signalled  avoids the node                  retrying, from this link
    the end of walltime is near      resumable             waits, queued again if needed    nothing: all is well
    the queue preempts the job       resumable             waits, queued again if needed    nothing: all is well
    the same, before a checkpoint    running, crash        finds PREEMPTED and resumes      retrying
    the queue requeues the job       -                     waits, or has begun: it ends     nothing
    walltime kills the job           running               finds TIMEOUT and resumes        nothing
    the kernel kills the job         running               resumes                          retrying, from the successor
    an administrator cancels it      cancelled             finds that and resumes           retrying, from the successor
    the user cancels it              cancelled             finds that and ends the chain    ended, from the successor
    the run is complete or cannot    complete, stopped,    is cancelled: the chain ends     complete or ended,
    continue                         config                                                 from this link
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place import queue_of
from hpc_grpo.launch.place.job_queue import JobEnd
from hpc_grpo.run.attempt import NEAR_THE_LIMIT_S, AttemptRecord, ExitKind

FOLLOWERS = 2
"""Follow-on jobs that wait behind a running link."""


@dataclass(frozen=True)
class News:
    """News of the run for the user. `ended`: incomplete, and no further job. `retrying`: the next job resumes it."""

    event: Literal["complete", "ended", "retrying"]
    why: str


@dataclass(frozen=True)
class PreviousLink:
    """A job before this one in the chain. `end` is the queue's end state; `left_s` the job's unused walltime.

    `was_killed`: the job was killed before it released the run, even if its record says otherwise. `left_an_attempt`:
    the job has an attempt.json.
    """

    job_id: str
    exit_kind: ExitKind
    why: str
    end: JobEnd = field(default_factory=JobEnd)
    left_s: float | None = None
    was_killed: bool = False
    left_an_attempt: bool = True

    @property
    def forbids_more(self) -> bool:
        """Return whether no job may follow: the user cancelled the job, or must change the config."""
        return self.was_cancelled or self.exit_kind == "config"

    @property
    def was_cancelled(self) -> bool:
        if self.end.state:
            return self.end.by_user
        # The queue no longer knows the job. A job asked to end long before its limit was cancelled.
        return self.exit_kind == "cancelled" and self.left_s is not None and self.left_s > NEAR_THE_LIMIT_S

    @property
    def could_not_tell(self) -> bool:
        """Return whether the job ended before it could notify the user. An end at the time limit needs no notice."""
        if self.exit_kind == "resumable" or self.end.at_time_limit:
            return False
        return self.was_killed or self.exit_kind in ("running", "cancelled")


@dataclass(frozen=True)
class StartFacts:
    """The facts at the start of a link. `previous` is None in the first job of a chain.

    `attempts` and `stalled` count since that job; `stalled` are the latest attempts in a row without a new checkpoint.
    `node_hours` are all of the run's until now. `user_knows`: an earlier link has reported why it ended. `replaced_by`
    is the job that continues the run instead: a started job behind this job, or one queued in its place; else "".
    """

    is_complete: bool
    stop_asked: bool
    previous: PreviousLink | None
    attempts: int
    max_attempts: int | None
    stalled: int
    max_stalled: int
    node_hours: float = 0.0
    max_node_hours: float | None = None
    user_knows: bool = False
    replaced_by: str = ""


@dataclass(frozen=True)
class StartDecision:
    """Whether to train. `why` is "" if a chain's first job trains. `gave_up`: a limit or an error ends the chain.

    `ends_chain`: if this job does not train, no later job may train either.
    """

    goes_on: bool
    why: str
    gave_up: bool = False
    news: News | None = None
    ends_chain: bool = True


def decide_start(facts: StartFacts) -> StartDecision:
    """Decide whether a starting job trains, and which news the user gets."""
    if facts.replaced_by:
        why = f"Job {facts.replaced_by} resumes the run in place of this one, which ends."
        return StartDecision(False, why, ends_chain=False)
    if (reason := _reason_to_end(facts)) is not None:
        why, gave_up = reason
        news = None if facts.user_knows else News("complete" if facts.is_complete else "ended", why)
        return StartDecision(False, why, gave_up, news)
    previous = facts.previous
    if previous is None:
        return StartDecision(True, "")
    how = f"ended as {previous.exit_kind}"
    if previous.exit_kind == "running":
        how = f"ended without a record ({previous.end.state or 'unknown to the queue'})"
    why = f"Job {previous.job_id} {how}; resuming the run."
    return StartDecision(True, why, news=News("retrying", why) if previous.could_not_tell else None)


def _reason_to_end(facts: StartFacts) -> tuple[str, bool] | None:
    """Return (why the chain ends here, whether it gives up) by the first matching rule; None if it continues."""
    previous = facts.previous
    if facts.is_complete:
        return "The run is complete.", False
    if facts.stop_asked:
        return "The STOP file asks the run to end; hpc-grpo submit resumes the run.", False
    if facts.max_node_hours is not None and facts.node_hours >= facts.max_node_hours:
        used, limit = facts.node_hours, facts.max_node_hours
        return f"{used:.1f} node-hours have been used; launch.slurm.max_node_hours = {limit:g}.", True
    if previous is None:
        return None
    if previous.was_cancelled:
        return f"Job {previous.job_id} was cancelled by the user; hpc-grpo submit resumes the run.", False
    if previous.exit_kind == "config":
        return f"The configuration must be changed first: {previous.why}", True
    if facts.stalled >= facts.max_stalled:
        limit_key = "launch.max_stalled_attempts"
        return f"No new checkpoint in {facts.stalled} attempts ({limit_key}). The last: {previous.why}", True
    if facts.max_attempts is not None and facts.attempts >= facts.max_attempts:
        return f"{facts.attempts} jobs have been used, as many as launch.slurm.max_job_chains allows.", True
    return None


def may_queue_successor(launch: LaunchConfig, links_before: int) -> bool:
    """Return whether this link may queue another. `links_before` counts the links since the user's submission."""
    max_links = launch.slurm.max_job_chains
    return launch.slurm.jobs_can_submit and (max_links is None or links_before < max_links)


Succession = Literal["end the chain", "have one wait", "keep it off lost nodes", "leave it"]


def decide_succession(attempt: AttemptRecord, stop_asked: bool) -> Succession:
    """Decide what happens to the successor after the attempt. A waiting successor also avoids the lost nodes."""
    if attempt.exit_kind in ("complete", "config", "stopped") or stop_asked:  # another job could do nothing
        return "end the chain"
    if not attempt.signalled:
        return "have one wait"
    # With a lost node, the queue ended the job. Otherwise somebody cancelled it, and the successor asks the queue who.
    return "keep it off lost nodes" if attempt.lost_nodes else "leave it"


def news_at_end(attempt: AttemptRecord, is_complete: bool, has_successor: bool, chain_ended: str) -> News | None:
    """Return the news for the user after an attempt. `chain_ended` is why no further job comes; "" if one may come."""
    if is_complete:
        return News("complete", attempt.why)
    if not has_successor:
        return News("ended", chain_ended or attempt.why)
    # Ended in time, as planned; or cancelled, and the successor learns by whom.
    return None if attempt.exit_kind in ("resumable", "cancelled") else News("retrying", attempt.why)


def node_hours_asked(launch: LaunchConfig) -> float:
    """Return the node-hours of a job that runs up to its time limit."""
    return launch.num_nodes * launch.slurm.time_min / 60


def node_hours_used(attempts: Sequence[AttemptRecord], now: float) -> float:
    """Count the node-hours that the jobs of a run's attempts, in order, have used until `now` (unix seconds).

    A job without a recorded end counts until the next job began or its allocation ended. So the count is never too low.
    """
    jobs = [attempt for attempt in attempts if queue_of(attempt.source) is not None]
    latest_ends = [*(following.started_at for _, following in pairwise(jobs)), now]
    node_seconds = 0.0
    for job, latest in zip(jobs, latest_ends, strict=False):
        end = job.ended_at if job.ended_at is not None else min(latest, job.ends_at or latest)
        node_seconds += len(job.nodes) * max(0.0, end - job.started_at)
    return node_seconds / 3600


def node_hours_when_over(attempts: Sequence[AttemptRecord], job_id: str, job_hours: float, now: float) -> float:
    """Count like `node_hours_used`, but count the running job `job_id` with the `job_hours` of its time limit."""
    over = [attempt for attempt in attempts if attempt.ended_at or attempt.job_id != job_id]
    is_job_over = any(attempt.job_id == job_id for attempt in over)
    return node_hours_used(over, now) + (0.0 if is_job_over else job_hours)


def within_node_hours(launch: LaunchConfig, used: float) -> LaunchConfig:
    """Return `launch` with the walltime that `used` node-hours leave. Raises ConfigError below `bringup_deadline_s`."""
    slurm = launch.slurm
    if slurm.max_node_hours is None:
        return launch
    left_min = int((slurm.max_node_hours - used) * 60 / launch.num_nodes)
    if left_min * 60 < launch.bringup_deadline_s:
        raise ConfigError(
            f"The jobs of this run have taken {used:.1f} of launch.slurm.max_node_hours = {slurm.max_node_hours:g}: "
            f"too little is left for another job of {launch.num_nodes} node(s). Raise the limit to continue."
        )
    shorter = slurm.model_copy(update={"time_min": min(slurm.time_min, left_min)})
    return launch.model_copy(update={"slurm": shorter})
