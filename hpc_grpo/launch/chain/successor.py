"""The job that waits to carry on after a link's own: queued, kept waiting, kept off nodes, cancelled.

Runs in the supervisor's process; `link.py` says when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.decide import may_queue_successor, node_hours_when_over, within_node_hours
from hpc_grpo.launch.chain.submit import attempt_command
from hpc_grpo.launch.place.job_queue import Job, JobQueue, JobRequest
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain, write_chain
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import say

_TRY_AGAIN_S = 300.0


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
