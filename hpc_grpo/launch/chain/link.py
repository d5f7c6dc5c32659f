"""Be a link of a run's chain of jobs: gather the facts for `decide`, and do what it decides.

Runs in the supervisor's process. Consumes the run directory and what the queue knows of the job before; produces at
most one waiting successor of this job, and news for the user. The supervisor calls the methods of `ChainLink` in the
order of a link's life: `decide`, `start`, `queue_again` every second, `finish`, and `tell` while the run is not held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.decide import (
    News,
    PreviousLink,
    StartDecision,
    StartFacts,
    decide_start,
    decide_succession,
    may_queue_successor,
    news_at_end,
    node_hours_asked,
    node_hours_used,
    node_hours_when_over,
    within_node_hours,
)
from hpc_grpo.launch.chain.notify import notify
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.place.base import Job, JobEnd, JobQueue, JobRequest
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import read_chain, stalled, write_chain
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.lock import EndedJob, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import not_worth_the_run, say

_TRY_AGAIN_S = 300.0
_NO_RECORD = "The chain's record could not be written"


@dataclass(frozen=True)
class LinkOrigin:
    """How a link's job came into the queue. `successor_of` is the job that queued it, "" where the user did.

    `by_hand`: the user gave the queue a script, with options of their own, instead of `hpc-grpo submit`.
    """

    successor_of: str = ""
    by_hand: bool = False


@dataclass(frozen=True)
class LinkJob:
    """The job of a link; `driver` is what it runs."""

    job_id: str
    driver: str
    origin: LinkOrigin = LinkOrigin()

    @property
    def successor_of(self) -> str:
        return self.origin.successor_of


class ChainLink:
    """This job as a link of its run's chain. Only `decide` and `tell` may be called while the run is not held."""

    def __init__(
        self,
        run: RunDir,
        launch: LaunchConfig,
        queue: JobQueue,
        job: LinkJob,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._launch, self._queue, self._job = run, launch, queue, job
        self._successor = Successor(run, launch, queue, job, clock)
        self._news: News | None = None
        self._end_before = queue.end_of(job.successor_of) if job.successor_of else JobEnd()

    @property
    def before(self) -> EndedJob | None:
        """Return the job before this one once the queue says that it is over, else None."""
        if not self._end_before.state:
            return None
        return EndedJob(self._job.successor_of, is_gone=not self._end_before.lost_a_node)

    def decide(self) -> StartDecision:
        """Decide whether this job trains; where it does not, end the chain."""
        own, launch, record = self._job, self._launch, read_chain(self._run)
        links = record.links_before(own.job_id, own.successor_of)
        decision = decide_start(
            StartFacts(
                is_complete=self._run.is_complete(),
                stop_asked=self._run.stop_marker.exists(),
                previous=_previous_link(self._run, own.successor_of, self._end_before) if own.successor_of else None,
                attempts=len(links),
                max_attempts=None if launch.slurm.max_job_chains is None else launch.slurm.max_job_chains + 1,
                stalled=stalled([link.first_step for link in links], newest_step(self._run)),
                max_stalled=launch.max_stalled_attempts,
                node_hours=node_hours_used(read_attempts(self._run), time.time()),
                max_node_hours=launch.slurm.max_node_hours,
                user_knows=own.successor_of != "" and record.ended != "",
            )
        )
        self._news = decision.news
        if not decision.goes_on:
            self._successor.end_chain(decision.why)
        return decision

    def start(self) -> None:
        """Enter this job into the record and queue its successor, if it may have one; say what fails."""
        with not_worth_the_run(_NO_RECORD):
            self._enter_record()
            self._successor.queue_or_say()

    def queue_again(self) -> None:
        """Try again, every few minutes, to queue a refused successor: a job that is killed sees no end to do it at."""
        with not_worth_the_run(_NO_RECORD):
            self._successor.queue_again()

    def finish(self, attempt: AttemptRecord) -> None:
        """Do with the successor what the end of the attempt asks for."""
        try:
            with not_worth_the_run(_NO_RECORD):
                match decide_succession(attempt, self._run.stop_marker.exists()):
                    case "end the chain":
                        self._successor.end_chain(attempt.why)
                    case "have one wait":
                        self._successor.have_one_wait(list(attempt.lost_nodes))
                    case "keep it off lost nodes":
                        self._successor.keep_off(list(attempt.lost_nodes))
                    case "leave it":
                        pass
        except LaunchError as error:
            say(f"The successor of this job is left as it is: {error}")
        with not_worth_the_run("What became of the run could not be read"):
            record = read_chain(self._run)
            has_successor = record.successor_behind(self._job.job_id) != ""
            self._news = news_at_end(attempt, self._run.is_complete(), has_successor, record.ended)

    def tell(self) -> None:
        """Run the user's command where there is news. While the run is not held, which the command may look at."""
        news, self._news = self._news, None
        if news is not None and self._launch.notify:
            notify(self._launch.notify, self._run, news)

    def _enter_record(self) -> None:
        own, before, job = self._job, read_chain(self._run), None
        asked = self._launch if own.origin.by_hand else before.launch(self._launch)
        self._successor.hours_before_it = node_hours_asked(asked)
        try:
            if (job := self._queue.show(own.job_id)) is not None:
                asked = job.asked(asked, by_hand=own.origin.by_hand)
                self._successor.hours_before_it = job.node_hours or node_hours_asked(asked)
        except LaunchError as error:
            say(f"What this job was given by hand is not known, so a successor asks for what the config says: {error}")
        output = job.output if job else ""
        record = before.with_link(own.job_id, own.successor_of, newest_step(self._run), output)
        successor = "" if record.successor == own.job_id else record.successor
        if not self._launch.slurm.jobs_can_submit:
            successor = next(iter(record.followers(own.job_id)), "")
        write_chain(self._run, replace(record.asking_for(asked), successor=successor, ended=""))


@dataclass
class Successor:
    """The job that carries on after this one: queues it, has it wait, keeps it off nodes, cancels it.

    `hours_before_it` are the node-hours that this job takes if it goes on to its time limit.
    """

    run: RunDir
    launch: LaunchConfig
    queue: JobQueue
    job: LinkJob
    clock: Callable[[], float]
    hours_before_it: float = 0.0
    try_again_at: float | None = None

    def queue_or_say(self) -> None:
        """Queue one if none waits and one may; say why not where the node-hours do not suffice."""
        try:
            self._queue_one()
        except ConfigError as error:
            say(f"No successor waits while this job runs: {error}")

    def queue_again(self) -> None:
        """Do as `queue_or_say` where the queue refused one some minutes ago."""
        if self.try_again_at is not None and self.clock() >= self.try_again_at:
            self.queue_or_say()

    def have_one_wait(self, lost_nodes: Sequence[str]) -> None:
        """Have a successor wait, off `lost_nodes`; end the chain if no node-hours are left. Raises LaunchError."""
        if (job := self._waiting()) is not None:
            return job.exclude_nodes(lost_nodes) if lost_nodes else None
        record = read_chain(self.run)
        if gone := record.successor_behind(self.job.job_id):
            say(f"Job {gone}, which was to carry on, is gone.")
            write_chain(self.run, replace(record, successor=""))
        try:
            self._queue_one()
        except ConfigError as error:
            self.end_chain(str(error))

    def keep_off(self, nodes: Sequence[str]) -> None:
        """Keep the one that waits off nodes. Raises LaunchError."""
        if (job := self._waiting()) is not None:
            job.exclude_nodes(nodes)

    def end_chain(self, why: str) -> None:
        """Cancel what waits behind this job, and write down why nothing does."""
        record = read_chain(self.run)
        if waiting := record.followers(self.job.job_id):
            try:
                self.queue.cancel(waiting)
            except LaunchError as error:
                say(f"What waits behind this job ends when it starts: {error}")
        closed = record.closed_by(self.job.job_id, why)
        if closed is not record:
            write_chain(self.run, closed)

    def _waiting(self) -> Job | None:
        """Return the successor that still waits or runs; None if there is none, or it is over."""
        successor = read_chain(self.run).successor_behind(self.job.job_id)
        job = self.queue.show(successor) if successor else None
        return None if job is None or job.is_over else job

    def _queue_one(self) -> None:
        """Queue one if none waits and one may. Raises ConfigError where the run's node-hours are used up."""
        self.try_again_at = None
        record, own = read_chain(self.run), self.job
        links_before = len(record.links_before(own.job_id, own.successor_of))
        if record.successor_behind(own.job_id) or not may_queue_successor(self.launch, links_before):
            return
        used = node_hours_when_over(read_attempts(self.run), own.job_id, self.hours_before_it, time.time())
        launch = within_node_hours(record.launch(self.launch), used)
        command = attempt_command(self.run, own.driver, successor_of=own.job_id)
        try:
            successor = self.queue.submit(JobRequest(self.run, launch, command, after=own.job_id))
        except LaunchError as error:
            say(f"No successor was queued, and it is tried again later: {error}")
            self.try_again_at = self.clock() + _TRY_AGAIN_S
            return
        write_chain(self.run, replace(record.with_link(successor, own.job_id), successor=successor))
        say(f"Queued job {successor}, which carries on if this one does not finish the run.")
        if self.run.stop_marker.exists():  # written by `cancel` since this link started, before it saw the successor
            self.end_chain("The STOP file asks the run to end.")


def _previous_link(run: RunDir, job_id: str, end: JobEnd) -> PreviousLink:
    known = [attempt for attempt in read_attempts(run) if attempt.job_id == job_id]
    if not known:
        return PreviousLink(job_id, "running", "It ended before it had begun.", end)
    last, owner = known[-1], read_lock_owner(run)
    left_s = last.ends_at - last.ended_at if last.ends_at and last.ended_at else None
    was_killed = owner is not None and owner.job_id == job_id
    return PreviousLink(job_id, last.exit_kind, last.why, end, left_s, was_killed)
