"""A link of a run's chain of jobs: gather the facts for `decide`, and carry out its decisions.

Runs in the supervisor's process. Reads the run directory and the queue's data on the previous job; keeps two jobs
waiting behind this one, and sends news to the user. The supervisor calls the methods of `ChainLink` in this order:
`have_two_wait`, `decide`, `start`, `try_again` every second, `finish`, and `tell` after the run is released.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, HpcGrpoError, LaunchError
from hpc_grpo.launch.chain import decide
from hpc_grpo.launch.chain.decide import News, PreviousLink, StartDecision, StartFacts
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.launch.place.job_queue import Job, JobEnd, JobQueue, JobRequest
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import ChainRecord, before_it_ran, read_chain, stalled, write_chain
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.lock import EndedJob, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.commands import Answer, run_command
from hpc_grpo.system.say import not_worth_the_run, say

_NO_RECORD = "The chain's record could not be written"
_TRY_AGAIN_S = 300.0
_DISK_AGAIN_S = 30.0


@dataclass(frozen=True)
class LinkJob:
    """The job of a link. `successor_of` is the job before it in the chain, "" for the first; `driver` is its program.

    `by_hand`: the user submitted a script of their own, with its options. The attempt fills in `job_id` and `driver`.
    """

    successor_of: str = ""
    by_hand: bool = False
    job_id: str = ""
    driver: str = ""


class ChainLink:
    """This job as a link of its run's chain, and the jobs that wait behind this job.

    Call `start`, `try_again` and `finish` only with the run's lock. From `start` on, the record names the successor.
    """

    def __init__(
        self,
        run: RunDir,
        launch: LaunchConfig,
        queue: JobQueue,
        job: LinkJob,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._launch, self._queue, self._job, self._clock = run, launch, queue, job, clock
        self._news: News | None = None
        self._again_at = math.inf
        self._output = ""
        self._node_hours: float | None = None
        self._knows_what_was_given = self._holds_run = False
        self._queued: dict[str, str] = {}  # job -> the job before it, as queued here; the record may lag behind
        self._doubtful: JobRequest | None = None

    @cached_property
    def _before(self) -> list[PreviousLink]:
        """The jobs before this one, latest first, back to the last one with an attempt.

        Leaves out followers that were cancelled before they began: they say nothing about the job before them.
        """
        record, before = read_chain(self._run), list[PreviousLink]()
        job_id = self._job.successor_of
        while job_id and len(before) <= decide.FOLLOWERS and not (before and before[-1].left_an_attempt):
            link = record.link(job_id)
            previous = _previous_link(self._run, job_id, self._queue.end_of(job_id))
            waits_for, has_begun = link.successor_of if link else "", self._run.job_mark(job_id).exists()
            if waits_for == "" or has_begun or previous.left_an_attempt or not previous.end.by_user:
                before.append(previous)
            job_id = waits_for
        return before

    @cached_property
    def _asked(self) -> LaunchConfig:
        """The launch options of the next jobs: the record's, or in a job by hand the config's. Raises OSError."""
        return self._launch if self._job.by_hand else read_chain(self._run).launch(self._launch)

    def _ask_what_was_given(self, queue: JobQueue) -> None:
        """Add this job's excluded nodes, and its options if submitted by hand, to the request for the jobs behind it.

        Queries the queue until it has answered once. If it does not answer, plans a retry. Raises OSError.
        """
        asked, own = self._asked, self._job
        try:
            if not self._knows_what_was_given and (job := queue.show(own.job_id)) is not None:
                self._output = job.output
                self._asked = job.asked(asked, by_hand=own.by_hand)
                self._node_hours = job.node_hours
            self._knows_what_was_given = True
        except LaunchError as error:
            say(f"The queue does not report this job's options, so a successor requests what the config says: {error}")
            self._again_at = self._clock() + _TRY_AGAIN_S

    def _record(self) -> ChainRecord:
        """Return the chain's record with this job and all jobs that this process queued."""
        record = read_chain(self._run)
        for job_id, before in {self._job.job_id: self._job.successor_of, **self._queued}.items():
            record = record if record.link(job_id) else record.with_link(job_id, before)
        return record

    def have_two_wait(self, queue: JobQueue | None = None) -> None:
        """Keep two jobs waiting behind this one, unless the run is done. Failures are reported and retried.

        A link calls this first: once two jobs wait, the end of this job cannot end the chain. Only the query of this
        job's options comes earlier, with ten seconds for an answer.
        """
        self._again_at = math.inf
        try:
            if self._run.is_complete() or self._run.stop_marker.exists() or self._is_left_behind():
                return
            # Before queueing: a job by hand may have another account, or more nodes, than the config.
            self._ask_what_was_given(queue or self._queue.in_a_hurry())
            self._queue_two(queue or self._queue)
        except ConfigError as error:
            say(f"No successor waits while this job runs: {error}")
        except (LaunchError, OSError) as error:
            pause_s = _DISK_AGAIN_S if isinstance(error, OSError) else _TRY_AGAIN_S
            say(f"Two jobs should wait behind this one, but could not be queued. Retry in {pause_s:.0f} s: {error}")
            self._again_at = self._clock() + pause_s

    def _is_left_behind(self) -> bool:
        """Return whether this job belongs to an earlier chain, or another job replaces it."""
        own, record = self._job, read_chain(self._run)
        current = [link.job_id for link in record.since_the_user()]
        is_old = own.successor_of != "" and bool(current) and not {own.job_id, own.successor_of} & set(current)
        return is_old or record.replaced_by(own.job_id, own.successor_of) != ""

    def _queue_two(self, queue: JobQueue) -> None:
        """Queue follow-on jobs until two wait behind this one, as far as the limits allow, and record them.

        Raises LaunchError and OSError; a repeated call queues the rest. Raises ConfigError if no job waits and too few
        node-hours are left.
        """
        record = self._record()
        behind = list(record.followers(self._job.job_id))
        try:
            while len(behind) < decide.FOLLOWERS and (job_id := self._queue_behind(record, behind, queue)):
                self._queued[job_id] = (self._job.job_id, *behind)[-1]
                behind.append(job_id)
                say(f"Queued job {job_id}, which resumes if the jobs before it do not finish the run.")
        except ConfigError:
            if not behind:
                raise
        finally:
            record = self._record()
            if self._holds_run:
                record = replace(record, successor=next(iter(record.followers(self._job.job_id)), ""))
            if record != read_chain(self._run):
                write_chain(self._run, record)
        if self._run.stop_marker.exists():  # written by `cancel_run`, which did not see the new jobs
            self._end_chain("The STOP file asks the run to end.")

    def _queue_behind(self, record: ChainRecord, behind: Sequence[str], queue: JobQueue) -> str:
        """Queue a follow-on job after this one and those `behind`. Return its id, "" if no more jobs are allowed."""
        own, asked = self._job, self._asked
        links_before = len(record.links_before(own.job_id, own.successor_of)) + len(behind)
        if not decide.may_queue_successor(asked, links_before):
            return ""
        own_hours = self._node_hours or decide.node_hours_asked(asked)  # up to the time limit of this job
        used = decide.node_hours_when_over(read_attempts(self._run), own.job_id, own_hours, time.time())
        for _ in behind:
            used += decide.node_hours_asked(decide.within_node_hours(asked, used))
        before = (own.job_id, *behind)
        command = attempt_command(self._run, own.driver, successor_of=before[-1])
        request = JobRequest(self._run, decide.within_node_hours(asked, used), command, after=before[-2:])
        if self._doubtful is not None and self._doubtful.after == request.after:
            request = replace(request, name=self._doubtful.name, may_be_queued=True)
        self._doubtful = request
        job_id = queue.submit(request)
        self._doubtful = None
        return job_id

    @property
    def before(self) -> EndedJob | None:
        """Return the previous job once the queue says that it has ended, else None."""
        if not self._before or not self._before[0].end.state:
            return None
        return EndedJob(self._before[0].job_id, is_gone=not self._before[0].end.lost_a_node)

    def decide(self) -> StartDecision:
        """Decide whether this job trains. If neither this nor a later job may train, end the chain."""
        own, launch, record = self._job, self._launch, read_chain(self._run)
        links = record.links_before(own.job_id, own.successor_of)
        decision = decide.decide_start(
            StartFacts(
                is_complete=self._run.is_complete(),
                stop_asked=self._run.stop_marker.exists(),
                previous=next((link for link in self._before if link.forbids_more), next(iter(self._before), None)),
                attempts=len(links),
                max_attempts=None if launch.slurm.max_job_chains is None else launch.slurm.max_job_chains + 1,
                stalled=stalled([link.first_step for link in links], newest_step(self._run)),
                max_stalled=launch.max_stalled_attempts,
                node_hours=decide.node_hours_used(read_attempts(self._run), time.time()),
                max_node_hours=launch.slurm.max_node_hours,
                user_knows=own.successor_of != "" and record.ended != "",
                replaced_by=record.replaced_by(own.job_id, own.successor_of),
            )
        )
        self._news = decision.news
        if not decision.goes_on and decision.ends_chain:
            with not_worth_the_run(_NO_RECORD):
                self._end_chain(decision.why)
        return decision

    def give_up(self, why: str) -> None:
        """End the chain before an attempt, and tell the user: the next job would fail in the same way."""
        with not_worth_the_run(_NO_RECORD):
            self._end_chain(why)
        self._news = News("ended", why)
        self.tell()

    def start(self) -> None:
        """Record this job as the one that holds the run. A failure is reported and retried."""
        try:
            own, self._holds_run = self._job, True
            record = self._record().with_link(own.job_id, own.successor_of, newest_step(self._run), self._output)
            # It was queued together with this job, or by this job before a requeue.
            successor = next(iter(record.followers(own.job_id)), "")
            write_chain(self._run, replace(record.asking_for(self._asked), successor=successor, ended=""))
        except OSError as error:
            say(f"{_NO_RECORD}: {error}")
            self._again_at = min(self._again_at, self._clock() + _DISK_AGAIN_S)

    def withdraw(self) -> None:
        """Remove a job by hand from the chain, and cancel its followers: another job holds the run."""
        if self._job.by_hand:
            with not_worth_the_run(_NO_RECORD):
                record, own = self._cancel_followers(), self._job.job_id
                write_chain(self._run, record.without([own, *record.followers(own)]))

    def try_again(self) -> None:
        """Once the pause is over, retry failed queueing and recording: a killed job cannot do this at its end.

        The supervisor waits for this call, so the queue gets only ten seconds for an answer.
        """
        if self._clock() >= self._again_at:
            self.have_two_wait(self._queue.in_a_hurry())
            self.start()

    def finish(self, attempt: AttemptRecord) -> None:
        """Update the successor according to the attempt's end, and keep the news for `tell`. Failures are reported."""
        try:
            with not_worth_the_run(_NO_RECORD):
                match decide.decide_succession(attempt, self._run.stop_marker.exists()):
                    case "end the chain":
                        self._end_chain(attempt.why)
                    case "have one wait":
                        self._ask_what_was_given(self._queue)
                        self._replace_lost(list(attempt.lost_nodes))
                    case "keep it off lost nodes":
                        self._keep_off(list(attempt.lost_nodes))
                    case "leave it":
                        pass
        except LaunchError as error:
            say(f"The successor of this job is left as it is: {error}")
        with not_worth_the_run("The end of the run could not be read"):
            record = read_chain(self._run)
            has_successor = record.successor_behind(self._job.job_id) != ""
            self._news = decide.news_at_end(attempt, self._run.is_complete(), has_successor, record.ended)

    def tell(self) -> None:
        """Run `launch.notify` if there is news. Call this after the run is released: the command may read the run."""
        news, self._news = self._news, None
        if news is not None and self._launch.notify:
            notify(self._launch.notify, self._run, news)

    def _replace_lost(self, lost_nodes: Sequence[str]) -> None:
        """At this job's end: queue jobs again if the next one was cancelled, and keep the waiting jobs off lost nodes.

        Ends the chain if no node-hours are left. Raises LaunchError and OSError.
        """
        record = self._record()
        behind = record.followers(self._job.job_id)
        if behind and self._waiting(behind[0]) is None:
            say(f"Job {behind[0]}, which should resume the run, is gone.")
            self._queue.cancel(behind)  # the first too: it may reappear in the queue
            self._queued = {job_id: before for job_id, before in self._queued.items() if job_id not in behind}
            write_chain(self._run, record.without(behind))
        try:
            self._queue_two(self._queue)
        except ConfigError as error:
            self._end_chain(str(error))
        else:
            self._keep_off(lost_nodes)

    def _keep_off(self, nodes: Sequence[str]) -> None:
        """Exclude `nodes` for the jobs that wait behind this one. Raises LaunchError."""
        for job_id in self._record().followers(self._job.job_id) if nodes else ():
            if (job := self._waiting(job_id)) is not None:
                job.exclude_nodes(nodes)

    def _waiting(self, job_id: str) -> Job | None:
        """Return a job that still waits or runs; None if it has ended."""
        job = self._queue.show(job_id)
        return None if job is None or job.is_over else job

    def _end_chain(self, why: str) -> None:
        """Cancel the jobs that wait behind this one, and record why no job follows."""
        record = self._cancel_followers()
        closed = record.closed_by(self._job.job_id, why)
        if closed is not record:
            write_chain(self._run, closed)

    def _cancel_followers(self) -> ChainRecord:
        """Cancel the jobs that wait behind this one. Return the record that names them."""
        record = self._record()
        if waiting := record.followers(self._job.job_id):
            try:
                self._queue.cancel(waiting)
            except LaunchError as error:
                say(f"The jobs behind this one were not cancelled, and end when they start: {error}")
        return record


def _previous_link(run: RunDir, job_id: str, end: JobEnd) -> PreviousLink:
    known = [attempt for attempt in read_attempts(run) if attempt.job_id == job_id]
    if not known:
        return PreviousLink(job_id, "running", before_it_ran(run, job_id), end, left_an_attempt=False)
    last, owner = known[-1], read_lock_owner(run)
    left_s = last.ends_at - last.ended_at if last.ends_at and last.ended_at else None
    was_killed = owner is not None and owner.job_id == job_id
    return PreviousLink(job_id, last.exit_kind, last.why, end, left_s, was_killed)


def notify(command: Sequence[str], run: RunDir, news: News, deadline_s: float = 30.0) -> None:
    """Run `command` in the run's working directory, with HPC_GRPO_EVENT, HPC_GRPO_RUN and HPC_GRPO_WHY set.

    Kills it after `deadline_s`. Prints its output and its failure; a failure changes nothing for the run.
    """
    told = {"HPC_GRPO_EVENT": news.event, "HPC_GRPO_RUN": str(run.path), "HPC_GRPO_WHY": news.why}
    try:
        program = str(Path(command[0]).expanduser())
        environ, folder = {**os.environ, **told}, working_dir(run)
        answer = run_command([program, *command[1:]], deadline_s, environ=environ, stdin="", cwd=folder)
    except (OSError, HpcGrpoError, RuntimeError, ValueError) as error:
        # RuntimeError: ~NAME of an unknown user. ValueError: text that the environment cannot hold.
        answer = Answer(error=str(error))
    for text in filter(None, (answer.text.strip(), answer.said)):
        say(text)
    if answer.error:
        say(f"launch.notify could not tell that the run is {news.event}: {answer.error}")
