"""Slurm as a job queue: reads jobs by scontrol and sacct, and acts on them.

Most methods of `SlurmQueue` make one or two calls to the scheduler (job_queue.py). Many calls slow the scheduler, so a
link makes few. Commands that show a run make none without `--slurm`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import JobInDoubtError, LaunchError
from hpc_grpo.launch.place.job_queue import JobEnd, JobRequest
from hpc_grpo.launch.place.slurm import given, sbatch, text
from hpc_grpo.launch.place.slurm.text import FINAL_STATES, OVER_STATES, minutes, output_of
from hpc_grpo.system.commands import Answer, run_command
from hpc_grpo.system.say import say

_AT_ONCE_S = 2.0
_IN_A_HURRY_S = 10.0
_ACCOUNTING_LAG_S = (5.0, 15.0)
"""Pauses before accounting is queried again. It may not yet know a job that started at its submission."""
_NO_ACCOUNTING = ("accounting storage is disabled", "no sacct on PATH")


def _sbatch(options: Sequence[str], script: str, deadline_s: float) -> Answer:
    """Pass a job script to sbatch on stdin, so that a full disk does not stop a successor."""
    environ = sbatch.submission_environment(os.environ)
    return run_command(["sbatch", *options], deadline_s, environ=environ, stdin=script)


@dataclass(frozen=True)
class SlurmQueue:
    """The queue of this cluster. Each of Slurm's commands has `deadline_s` for its answer."""

    run: Callable[..., str] = output_of
    sleep: Callable[[float], None] = time.sleep
    deadline_s: float = 60.0

    def in_a_hurry(self) -> SlurmQueue:
        return replace(self, sleep=lambda _: None, deadline_s=_IN_A_HURRY_S)

    def ask(self, argv: Sequence[str]) -> str:
        return self.run(argv, deadline_s=self.deadline_s)

    def accounted(self, job_id: str, field_name: str) -> Iterator[str]:
        """Yield accounting's value of a field up to three times, with pauses: accounting may lag. "" means no value.

        Yields nothing on a site without accounting.
        """
        for pause_s in (0.0, *_ACCOUNTING_LAG_S):
            self.sleep(pause_s)
            try:
                answer = self.ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", field_name])
            except LaunchError as error:
                if any(sign in str(error) for sign in _NO_ACCOUNTING):
                    return
                answer = ""
            yield answer.partition("\n")[0].strip()

    def render(self, request: JobRequest) -> str:
        return sbatch.render(request)

    def submit(self, request: JobRequest) -> str:
        """Queue the job. If sbatch fails, look the job up by its name: Slurm may have accepted it.

        A retry looks it up first. If the user set a comment of their own, the job has no name to look up.
        """
        script = sbatch.render(request)
        if request.may_be_queued and (job_id := self._queued(request)):
            return job_id
        if not request.tasks:  # the folders of an array exist
            request.run.slurm_logs.mkdir(parents=True, exist_ok=True)  # without it, the job would die silently
        named = [] if "comment" in sbatch.extra_options(request.launch.slurm) else [f"--comment={request.name}"]
        answer = _sbatch(named, script, self.deadline_s)
        if answer.is_absent:
            raise LaunchError("This machine has no Slurm (no sbatch on PATH); run `hpc-grpo train` instead.")
        if found := re.search(r"\bjob (\d+)", answer.text):
            return found[1]
        refusal, is_known = f"sbatch refused the job: {answer.said or answer.error}", False
        with suppress(LaunchError):
            if job_id := self._queued(request):
                return job_id
            is_known = bool(named)
        if is_known:
            raise LaunchError(refusal)
        raise JobInDoubtError(f"{refusal}\nThe job may be queued all the same: `squeue --me` shows your jobs.")

    def _queued(self, request: JobRequest) -> str:
        """Return the id of the queued job with the name of a request, "" if there is none."""
        # Without --all, squeue and scontrol leave out hidden partitions.
        printed = self.ask(["squeue", "--all", "--noheader", f"--user={os.getuid()}", "--format=%i|%k"])
        jobs = dict(line.strip().split("|", 1)[::-1] for line in printed.splitlines() if "|" in line)
        return jobs.get(request.name, "").partition("_")[0]  # of an array: 17_[0-5]

    def start_estimate(self, request: JobRequest, deadline_s: float = 60.0) -> str:
        answer = _sbatch(["--test-only"], sbatch.render(request), deadline_s)
        if answer.error:
            raise LaunchError(f"sbatch would refuse the job: {answer.said}" if answer.said else answer.error)
        return f"{answer.said}\n"  # it writes the estimate to stderr

    def with_own_settings(self, launch: LaunchConfig, environ: Mapping[str, str]) -> LaunchConfig:
        return given.where_silent(launch, given.from_variables(environ))

    def show(self, job_id: str) -> SlurmJob | None:
        try:
            shown = self.ask(["scontrol", "show", "job", job_id])
        except LaunchError as error:
            if "Invalid job id" in str(error):  # forgotten, some minutes after its end
                return None
            raise
        is_task = "_" in job_id  # the query then names one record, which has another JobId
        records = (record for record in text.records(shown) if is_task or record.get("JobId") == job_id)
        return next((SlurmJob(job_id, record, self) for record in records), None)

    def end_of(self, job_id: str) -> JobEnd:
        state = self._final_state(job_id)
        by = re.search(r"by (\d+)", state)
        return JobEnd(
            state,
            # If Slurm does not say who cancelled, for example without accounting, it was the user.
            by_user=state.startswith("CANCELLED") and (by is None or int(by[1]) == os.getuid()),
            at_time_limit=state.startswith("TIMEOUT"),
            lost_a_node=state.startswith("NODE_FAIL"),
        )

    def _final_state(self, job_id: str) -> str:
        """Return a job's final state from sacct ("CANCELLED by 1000"), else from scontrol; "" if neither knows.

        scontrol does not name who cancelled, so accounting is queried until it does.
        """
        shown = ""
        for state in self.accounted(job_id, "State"):
            if state.partition(" ")[0] in FINAL_STATES:
                return state
            if (shown := shown or self._shown_end(job_id)) != "CANCELLED":
                return shown
        return shown or self._shown_end(job_id)

    def _shown_end(self, job_id: str) -> str:
        with suppress(LaunchError):
            if (job := self.show(job_id)) is not None and job.state in FINAL_STATES:
                return job.state
        return ""

    def preempted_until(self, job_id: str) -> float | None:
        try:
            shown = replace(self, deadline_s=_AT_ONCE_S).show(job_id)
        except LaunchError:
            return None
        if shown is None or shown.state != "RUNNING" or text.unix_time(shown.fields.get("PreemptTime", "")) is None:
            return None
        return text.unix_time(shown.fields.get("EndTime", ""))

    def cancel(self, job_ids: Sequence[str]) -> None:
        self.ask(["scancel", "--quiet", *job_ids])

    def release(self, job_id: str) -> None:
        self.ask(["scontrol", "release", job_id])


@dataclass(frozen=True)
class SlurmJob:
    """A job of `queue`. `fields` are those of `scontrol show job`, by Slurm's names."""

    job_id: str
    fields: Mapping[str, str]
    queue: SlurmQueue

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "")

    @property
    def is_over(self) -> bool:
        return self.state in OVER_STATES

    @property
    def output(self) -> str:
        path = self.fields.get("StdOut", "").strip()
        return path if path.startswith("/") else ""

    @property
    def node_hours(self) -> float | None:
        time_min = minutes(self.fields.get("TimeLimit", ""))
        return None if time_min is None or "NumNodes" not in self.fields else self._num_nodes * time_min / 60

    def asked(self, launch: LaunchConfig, *, by_hand: bool) -> LaunchConfig:
        if by_hand:
            launch = given.overlaid(launch, self._given())
        if "ExcNodeList" not in self.fields:
            return launch
        extra = {**launch.slurm.extra, "exclude": self.fields["ExcNodeList"]}
        return launch.model_copy(update={"slurm": launch.slurm.model_copy(update={"extra": extra})})

    def _given(self) -> given.Options:
        """Return the options given to sbatch. If the site keeps no command lines, use the job's resources instead."""
        script = self.queue.ask(["scontrol", "write", "batch_script", self.job_id, "-"])
        if submitted := next(filter(None, self.queue.accounted(self.job_id, "SubmitLine")), ""):
            return given.given_options(script, os.environ, submitted, self.fields.get("Command", ""))
        say("Slurm does not say how sbatch was called: successors request the nodes, time and GPUs of this job.")
        # The resources of the job that no site rewrites.
        gpus = sum(map(int, re.findall(r"gpu(?::[^:,=]+)?[:=](\d+)", self.fields.get("TresPerNode", ""))))
        cpus = self.fields.get("CPUs/Task", "1")
        found: given.Options = {"nodes": str(self._num_nodes), "time": self.fields.get("TimeLimit", "")}
        found |= {"gpus-per-node": str(gpus)} if gpus else {}
        found |= {"cpus-per-task": cpus} if cpus != "1" else {}
        return given.given_options(script, os.environ, "", "") | found

    @property
    def _num_nodes(self) -> int:
        return int(self.fields.get("NumNodes", "1").partition("-")[0])

    def exclude_nodes(self, nodes: Sequence[str]) -> None:
        ask, names = self.queue.ask, self.fields["Partition"].split(",")
        excluded = [*([self.fields["ExcNodeList"]] if "ExcNodeList" in self.fields else []), *nodes]
        partitions = [text.fields(ask(["scontrol", "--all", "show", "partition", name])) for name in names]
        members = {node for one in partitions if "Nodes" in one for node in text.hostnames(one["Nodes"], ask)}
        if len(members - set(text.hostnames(",".join(excluded), ask))) < self._num_nodes:
            raise LaunchError(f"without {', '.join(nodes)} its partition has fewer than {self._num_nodes} nodes")
        ask(["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={','.join(excluded)}"])
