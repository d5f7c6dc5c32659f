"""The jobs that wait to carry on after a link's own: queued, kept waiting, kept off nodes, cancelled.

Runs in the supervisor's process; `link.py` says when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.decide import (
    FOLLOWERS,
    may_queue_successor,
    node_hours_asked,
    node_hours_when_over,
    within_node_hours,
)
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.place.job_queue import Job, JobQueue, JobRequest
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import say


@dataclass(frozen=True)
class LinkOrigin:
    """Says how a link's job came into the queue. `successor_of` is the job that queued it, "" where the user did.

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


@dataclass
class Successors:
    """The jobs that carry on after this one.

    `launch` is what they ask for. `hours_before` are the node-hours that this job takes up to its time limit.
    `holds_run`: this link holds the run, so that the record names its successor.
    """

    run: RunDir
    launch: LaunchConfig
    queue: JobQueue
    job: LinkJob
    hours_before: float
    holds_run: bool = False
    _queued: dict[str, str] = field(default_factory=dict)
    """Job -> the job before it, of the jobs that this process queued: the record may not be written yet."""
    _doubtful: JobRequest | None = None

    def record(self) -> ChainRecord:
        """Return the chain's record with this job and all jobs that this process queued."""
        record = read_chain(self.run)
        for job_id, before in {self.job.job_id: self.job.successor_of, **self._queued}.items():
            record = record if record.link(job_id) else record.with_link(job_id, before)
        return record

    def have_two_wait(self) -> None:
        """Have two jobs wait behind this one, as far as they may, and write that down.

        Raises LaunchError and OSError, after which a repeated call does the rest. Raises ConfigError where no job
        waits, because no node-hours are left.
        """
        record = self.record()
        behind = list(record.followers(self.job.job_id))
        try:
            while len(behind) < FOLLOWERS and (job_id := self._queue_behind(record, behind)):
                self._queued[job_id] = (self.job.job_id, *behind)[-1]
                behind.append(job_id)
                say(f"Queued job {job_id}, which carries on if the jobs before it do not finish the run.")
        except ConfigError:
            if not behind:
                raise
        finally:
            self._write()
        if self.run.stop_marker.exists():  # written by `cancel` since this link started, before it saw the successor
            self.end_chain("The STOP file asks the run to end.")

    def replace_lost(self, lost_nodes: Sequence[str]) -> None:
        """At the end of this job: have two wait again where somebody cancelled the next one; keep them off lost nodes.

        Ends the chain where no node-hours are left. Raises LaunchError and OSError.
        """
        record = self.record()
        behind = record.followers(self.job.job_id)
        if behind and self._waiting(behind[0]) is None:
            say(f"Job {behind[0]}, which was to carry on, is gone.")
            if behind[1:]:
                self.queue.cancel(behind[1:])
            self._queued = {job_id: before for job_id, before in self._queued.items() if job_id not in behind}
            write_chain(self.run, record.without(behind))
        try:
            self.have_two_wait()
        except ConfigError as error:
            self.end_chain(str(error))
        else:
            self.keep_off(lost_nodes)

    def keep_off(self, nodes: Sequence[str]) -> None:
        """Keep those that wait off nodes. Raises LaunchError."""
        for job_id in self.record().followers(self.job.job_id) if nodes else ():
            if (job := self._waiting(job_id)) is not None:
                job.exclude_nodes(nodes)

    def end_chain(self, why: str) -> None:
        """Cancel what waits behind this job, and write down why nothing does."""
        record = self.record()
        if waiting := record.followers(self.job.job_id):
            try:
                self.queue.cancel(waiting)
            except LaunchError as error:
                say(f"What waits behind this job ends when it starts: {error}")
        closed = record.closed_by(self.job.job_id, why)
        if closed is not record:
            write_chain(self.run, closed)

    def _waiting(self, job_id: str) -> Job | None:
        """Return a job that still waits or runs; None if it is over."""
        job = self.queue.show(job_id)
        return None if job is None or job.is_over else job

    def _queue_behind(self, record: ChainRecord, behind: Sequence[str]) -> str:
        """Queue a job after this one and those behind it; return its id, "" where no more may be queued."""
        own = self.job
        links_before = len(record.links_before(own.job_id, own.successor_of)) + len(behind)
        if not may_queue_successor(self.launch, links_before):
            return ""
        used = node_hours_when_over(read_attempts(self.run), own.job_id, self.hours_before, time.time())
        for _ in behind:
            used += node_hours_asked(within_node_hours(self.launch, used))
        before = (own.job_id, *behind)
        command = attempt_command(self.run, own.driver, successor_of=before[-1])
        request = JobRequest(self.run, within_node_hours(self.launch, used), command, after=before[-2:])
        if self._doubtful is not None and self._doubtful.after == request.after:
            request = replace(request, name=self._doubtful.name, may_be_queued=True)
        self._doubtful = request
        job_id = self.queue.submit(request)
        self._doubtful = None
        return job_id

    def _write(self) -> None:
        record = self.record()
        if self.holds_run:
            record = replace(record, successor=next(iter(record.followers(self.job.job_id)), ""))
        if record != read_chain(self.run):
            write_chain(self.run, record)
