"""A run as a chain of Slurm jobs: each link queues its successor when it starts, and calls it off when it is done.

Consumes the run directory and Slurm's record of the link before; produces at most one waiting successor.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from hpc_grpo.config import Config
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch import slurm
from hpc_grpo.launch.attempt_record import AttemptRecord, read_attempts
from hpc_grpo.launch.chain_record import Link, read_chain, write_chain
from hpc_grpo.launch.decision import Decision, Facts, PreviousLink, decide
from hpc_grpo.launch.slurm_job import WAITING_STATES, cancel_jobs, exclude_nodes, final_state, show_job
from hpc_grpo.manifest import newest_step
from hpc_grpo.run_dir import RunDir

_DONE = ("complete", "config", "stopped")
"""After these another job could do nothing."""


class ChainLink:
    """This job as a link of its run's chain."""

    def __init__(self, run: RunDir, config: Config, job_id: str, command: str) -> None:
        """`command` is the shell line a successor's script ends with."""
        self._run, self._config, self._job_id, self._command = run, config, job_id, command
        self._attempts = read_attempts(run)
        self.successor_of = self._join()
        self._previous_state = final_state(self.successor_of) if self.successor_of else ""

    @property
    def ended_job(self) -> str | None:
        """The job before this one, if Slurm says that it is over."""
        return self.successor_of if self._previous_state else None

    def decide(self) -> Decision:
        launch = self._config.launch
        chained = _since_the_user(self._attempts)
        max_chains = launch.slurm.max_job_chains
        decision = decide(
            Facts(
                is_complete=self._run.is_complete(),
                stop_asked=self._run.stop_marker.exists(),
                previous=self._previous_link(),
                attempts=len(chained),
                max_attempts=None if max_chains is None else max_chains + 1,
                stalled=stalled([attempt.first_step for attempt in chained], newest_step(self._run)),
                max_stalled=launch.max_stalled_attempts,
            )
        )
        if not decision.goes_on:
            self.call_off(decision.why)
        return decision

    def queue_successor(self) -> None:
        """Queue the next link if the chain may have one; a failure is told, and `finish` tries again."""
        record = read_chain(self._run)
        if record.successor or not self._may_have_successor():
            return
        job = show_job(self._job_id)
        if job is None:
            print(f"No successor was queued: Slurm says nothing about job {self._job_id}.", flush=True)
            return
        launch = job.launch(self._config.launch)
        try:
            successor = slurm.submit(launch, self._run, self._command, after=self._job_id)
        except LaunchError as error:
            print(f"No successor was queued, and it is tried again at the end: {error}", flush=True)
            return
        write_chain(self._run, record.with_link(successor, self._job_id))
        print(f"Queued job {successor}, which carries on if this one does not finish the run.", flush=True)
        if self._run.stop_marker.exists():  # written by `cancel` since this link started, before it saw the successor
            self.call_off("The STOP file asks the run to end.")

    def finish(self, attempt: AttemptRecord, *, was_signalled: bool) -> None:
        """After the attempt: call the successor off, or see to it that one waits and keeps off bad nodes."""
        if attempt.exit_kind in _DONE or self._run.stop_marker.exists():
            self.call_off(attempt.why)
            return
        if was_signalled and attempt.exit_kind == "cancelled":
            return  # the successor learns from Slurm who ended this job
        self._replace_lost_successor()
        if (successor := read_chain(self._run).successor) and attempt.lost_nodes:
            try:
                exclude_nodes(successor, list(attempt.lost_nodes))
            except LaunchError as error:
                print(f"Job {successor} may get the lost node again: {error}", flush=True)

    def call_off(self, why: str) -> None:
        """Cancel the waiting successor, and write down why the chain ends."""
        record = read_chain(self._run)
        if record.successor:
            cancel_jobs([record.successor])
        write_chain(self._run, replace(record, successor="", ended=why))

    def _join(self) -> str:
        """Enter this job into the record; returns the job that had queued it."""
        record = read_chain(self._run)
        known = {link.job_id: link for link in record.links}
        link = known.get(self._job_id, Link(self._job_id, time.time()))
        links = record.links if self._job_id in known else (*record.links, link)
        successor = "" if record.successor == self._job_id else record.successor
        write_chain(self._run, replace(record, links=links, successor=successor, ended=""))
        return link.successor_of

    def _previous_link(self) -> PreviousLink | None:
        if not self.successor_of:
            return None
        known = [attempt for attempt in self._attempts if attempt.job_id == self.successor_of]
        if not known:
            return PreviousLink(self.successor_of, "running", "It never started.", self._previous_state)
        last = known[-1]
        left_s = last.ends_at - last.ended_at if last.ends_at and last.ended_at else None
        return PreviousLink(self.successor_of, last.exit_kind, last.why, self._previous_state, left_s)

    def _may_have_successor(self) -> bool:
        max_chains = self._config.launch.slurm.max_job_chains
        return max_chains is None or len(_since_the_user(self._attempts)) < max_chains

    def _replace_lost_successor(self) -> None:
        record = read_chain(self._run)
        if record.successor:
            job = show_job(record.successor)
            if job is not None and job.state in WAITING_STATES:
                return
            print(f"Job {record.successor}, which was to carry on, is gone; queueing another.", flush=True)
            write_chain(self._run, replace(record, successor=""))
        self.queue_successor()


def stalled(first_steps: Sequence[int], newest: int) -> int:
    """How many of the latest attempts ended without a newer checkpoint than they started from.

    >>> stalled([0, 4, 4, 4], newest=4)
    3
    """
    count = 0
    for first, after in zip(reversed(first_steps), [newest, *reversed(first_steps)], strict=False):
        if after > first:
            break
        count += 1
    return count


def _since_the_user(attempts: Sequence[AttemptRecord]) -> list[AttemptRecord]:
    """The attempts from the last one on that the user started."""
    started = max((index for index, attempt in enumerate(attempts) if not attempt.successor_of), default=0)
    return list(attempts[started:])
