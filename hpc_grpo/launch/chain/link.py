"""A run as a chain of Slurm jobs: each link queues its successor when it starts, and cancels it when it is done.

Consumes the run directory and Slurm's record of the link before; produces at most one waiting successor of this link.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError, LaunchError
from hpc_grpo.launch.chain.decide import Decision, Facts, PreviousLink, decide
from hpc_grpo.launch.chain.node_hours import node_hours_asked, node_hours_used, within_node_hours
from hpc_grpo.launch.chain.notify import News, notify
from hpc_grpo.launch.place.slurm import sbatch as slurm
from hpc_grpo.launch.place.slurm.jobs import WAITING_STATES, SlurmJob, cancel_jobs, exclude_nodes, final_state, show_job
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import Link, asked_for, read_chain, stalled, write_chain
from hpc_grpo.run.checkpoint import newest_step
from hpc_grpo.run.lock import EndedJob, read_lock_owner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.say import not_worth_the_run, say

_DONE = ("complete", "config", "stopped")
"""After these another job could do nothing."""
_TRY_AGAIN_S = 300.0


class ChainLink:
    """This job as a link of its run's chain. Only `decide` may be called before the run is held."""

    def __init__(self, run: RunDir, config: Config, job_id: str, successor_of: str, driver: str) -> None:
        """`successor_of` is the job that queued this one, "" when the user handed it in."""
        self._run, self._config, self._job_id, self._driver = run, config, job_id, driver
        self._successor_of = successor_of
        self._try_again_at: float | None = None
        self._news: News | None = None
        self._own_node_hours = 0.0
        self._previous_state = final_state(successor_of) if successor_of else ""

    @property
    def before(self) -> EndedJob | None:
        """The job before this one, if Slurm knows that it is over."""
        if not self._previous_state:
            return None
        return EndedJob(self._successor_of, is_gone=not self._previous_state.startswith("NODE_FAIL"))

    def decide(self) -> Decision:
        launch, attempts = self._config.launch, read_attempts(self._run)
        before = self._links_before()
        previous = self._previous_link() if self._successor_of else None
        decision = decide(
            Facts(
                is_complete=self._run.is_complete(),
                stop_asked=self._run.stop_marker.exists(),
                previous=previous,
                attempts=len(before),
                max_attempts=None if launch.slurm.max_job_chains is None else launch.slurm.max_job_chains + 1,
                stalled=stalled([link.first_step for link in before], newest_step(self._run)),
                max_stalled=launch.max_stalled_attempts,
                node_hours=node_hours_used(attempts, time.time()),
                max_node_hours=launch.slurm.max_node_hours,
            )
        )
        if not decision.goes_on:
            was_told = self._successor_of != "" and read_chain(self._run).ended != ""
            self._end(decision.why)
            if not was_told:
                self._news = News("complete" if self._run.is_complete() else "ended", decision.why)
        elif previous is not None and previous.could_not_tell:
            self._news = News("retrying", decision.why)
        return decision

    def start(self) -> None:
        """Enter this job into the record, and queue its successor if the chain may have one.

        A failure is told; `finish` tries again.
        """
        with not_worth_the_run("The chain's record could not be written"):
            job = self._show_own_job()
            step, output = newest_step(self._run), job.output if job else ""
            record = read_chain(self._run).with_link(self._job_id, self._successor_of, step, output)
            launch = job.launch(self._config.launch) if job else self._config.launch
            successor = "" if record.successor == self._job_id else record.successor
            self._own_node_hours = node_hours_asked(launch)
            asked = asked_for(launch)
            if self._config.launch.slurm.max_node_hours is not None:  # may have cut this job short, not those after it
                asked["time_min"] = max(launch.slurm.time_min, self._config.launch.slurm.time_min)
            if not self._config.launch.slurm.jobs_can_submit:
                successor = next(iter(record.followers(self._job_id)), "")
            write_chain(self._run, replace(record, successor=successor, ended="", slurm=asked))
            self._queue_or_say()

    def queue_again(self) -> None:
        """To be called now and then: where sbatch failed before, tries again every few minutes.

        Not at the end alone, which a job that is killed does not see.
        """
        if self._try_again_at is not None and time.monotonic() >= self._try_again_at:
            with not_worth_the_run("The chain's record could not be written"):
                self._queue_or_say()

    def finish(self, attempt: AttemptRecord) -> None:
        """After the attempt: cancel the successor, or see to it that one waits and keeps off bad nodes."""
        try:
            with not_worth_the_run("The chain's record could not be written"):
                if attempt.exit_kind in _DONE or self._run.stop_marker.exists():
                    self._end(attempt.why)
                elif not attempt.signalled:
                    self._see_to_successor(attempt)
                elif attempt.lost_nodes:  # for which Slurm ended the job; else the successor learns from it who did
                    self._keep_off(list(attempt.lost_nodes))
        except LaunchError as error:
            say(f"The successor of this job is left as it is: {error}")
        with not_worth_the_run("What became of the run could not be read"):
            self._news = self._news_of(attempt)

    def tell(self) -> None:
        """Have the user's command tell what has become of the run. While the run is not held, which it may look at."""
        news, self._news = self._news, None
        if news is not None and self._config.launch.notify:
            notify(self._config.launch.notify, self._run, news)

    def _news_of(self, attempt: AttemptRecord) -> News | None:
        if self._run.is_complete():
            return News("complete", attempt.why)
        if not self._own_successor():
            return News("ended", read_chain(self._run).ended or attempt.why)
        # In time, as it should be; or cancelled, and the successor learns by whom.
        return None if attempt.exit_kind in ("resumable", "cancelled") else News("retrying", attempt.why)

    def _see_to_successor(self, attempt: AttemptRecord) -> None:
        successor = self._own_successor()
        job = show_job(successor) if successor else None
        if successor and (job is None or job.state not in WAITING_STATES):
            say(f"Job {successor}, which was to carry on, is gone.")
            successor = ""
            write_chain(self._run, replace(read_chain(self._run), successor=""))
        if not successor:
            try:
                self._queue_successor()
            except ConfigError as error:
                self._end(str(error))
        elif job is not None and attempt.lost_nodes:
            exclude_nodes(job, list(attempt.lost_nodes))

    def _keep_off(self, nodes: Sequence[str]) -> None:
        successor = self._own_successor()
        job = show_job(successor) if successor else None
        if job is not None and job.state in WAITING_STATES:
            exclude_nodes(job, nodes)

    def _queue_or_say(self) -> None:
        try:
            self._queue_successor()
        except ConfigError as error:
            say(f"No successor waits while this job runs: {error}")

    def _queue_successor(self) -> None:
        """Raises ConfigError where the run's node-hours are used up."""
        self._try_again_at = None
        record = read_chain(self._run)
        max_chains = self._config.launch.slurm.max_job_chains
        may_have_one = max_chains is None or len(self._links_before()) < max_chains
        if self._own_successor() or not may_have_one or not self._config.launch.slurm.jobs_can_submit:
            return
        command = slurm.attempt_command(self._run, self._driver, successor_of=self._job_id)
        try:
            launch = within_node_hours(record.launch(self._config.launch), self._node_hours_in_the_end())
            successor = slurm.submit(launch, self._run, command, after=self._job_id)
        except LaunchError as error:
            say(f"No successor was queued, and it is tried again later: {error}")
            self._try_again_at = time.monotonic() + _TRY_AGAIN_S
            return
        write_chain(self._run, replace(record.with_link(successor, self._job_id), successor=successor))
        say(f"Queued job {successor}, which carries on if this one does not finish the run.")
        if self._run.stop_marker.exists():  # written by `cancel` since this link started, before it saw the successor
            self._end("The STOP file asks the run to end.")

    def _end(self, why: str) -> None:
        """Cancel what waits behind this link and write down why nothing does."""
        record = read_chain(self._run)
        if waiting := record.followers(self._job_id):
            try:
                cancel_jobs(waiting)
            except LaunchError as error:
                say(f"What waits behind this job ends when it starts: {error}")
        # Unless the user has handed in another job since.
        others = [link.job_id for link in record.links if link.job_id not in waiting]
        if not others or others[-1] == self._job_id:
            write_chain(self._run, replace(record, successor="", ended=why))

    def _node_hours_in_the_end(self) -> float:
        """All of the run's when this job is over: until then it counts to its time limit."""
        over = [attempt for attempt in read_attempts(self._run) if attempt.ended_at or attempt.job_id != self._job_id]
        is_over = any(attempt.job_id == self._job_id for attempt in over)
        return node_hours_used(over, time.time()) + (0.0 if is_over else self._own_node_hours)

    def _own_successor(self) -> str:
        record = read_chain(self._run)
        link = record.link(record.successor)
        return record.successor if link is not None and link.successor_of == self._job_id else ""

    def _links_before(self) -> list[Link]:
        """The chain's links before this one, since the user last handed the run in."""
        if not self._successor_of:
            return []
        links = read_chain(self._run).since_the_user()
        return list(takewhile(lambda link: link.job_id != self._job_id, links))

    def _show_own_job(self) -> SlurmJob | None:
        try:
            return show_job(self._job_id)
        except LaunchError as error:
            say(f"What this job was given is not known, so a successor asks for what the config says: {error}")
            return None

    def _previous_link(self) -> PreviousLink:
        known = [attempt for attempt in read_attempts(self._run) if attempt.job_id == self._successor_of]
        if not known:
            return PreviousLink(self._successor_of, "running", "It ended before it had begun.", self._previous_state)
        last = known[-1]
        left_s = last.ends_at - last.ended_at if last.ends_at and last.ended_at else None
        holder = read_lock_owner(self._run)
        was_killed = holder is not None and holder.job_id == self._successor_of
        return PreviousLink(self._successor_of, last.exit_kind, last.why, self._previous_state, left_s, was_killed)
