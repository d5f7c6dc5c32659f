"""Be a link of a run's chain of jobs: gather the facts for `decide`, and do what it decides.

Runs in the supervisor's process. Consumes the run directory and what the queue knows of the job before; produces at
most one waiting successor of this job, and news for the user. The supervisor calls the methods of `ChainLink` in the
order of a link's life: `decide`, `start`, `queue_again` every second, `finish`, and `tell` while the run is not held.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.chain.decide import (
    News,
    PreviousLink,
    StartDecision,
    StartFacts,
    decide_start,
    decide_succession,
    news_at_end,
    node_hours_asked,
    node_hours_used,
)
from hpc_grpo.launch.chain.notify import notify
from hpc_grpo.launch.chain.successor import LinkJob, Successor
from hpc_grpo.launch.place.job_queue import JobEnd, JobQueue
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import before_it_ran, read_chain, stalled, write_chain
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.lock import EndedJob, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import not_worth_the_run, say

_NO_RECORD = "The chain's record could not be written"


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
                replaced_by=record.begun_behind(own.job_id),
            )
        )
        self._news = decision.news
        if not decision.goes_on and decision.ends_chain:
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
        # Queued with this job; or by it, before the queue started it again.
        successor = next(iter(record.followers(own.job_id)), "")
        write_chain(self._run, replace(record.asking_for(asked), successor=successor, ended=""))


def _previous_link(run: RunDir, job_id: str, end: JobEnd) -> PreviousLink:
    known = [attempt for attempt in read_attempts(run) if attempt.job_id == job_id]
    if not known:
        return PreviousLink(job_id, "running", before_it_ran(run, job_id), end)
    last, owner = known[-1], read_lock_owner(run)
    left_s = last.ends_at - last.ended_at if last.ends_at and last.ended_at else None
    was_killed = owner is not None and owner.job_id == job_id
    return PreviousLink(job_id, last.exit_kind, last.why, end, left_s, was_killed)
