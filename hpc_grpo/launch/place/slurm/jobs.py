"""Slurm's jobs behind the interface of a job queue: what scontrol and sacct say of one, and what is done to it.

A method of `SlurmQueue` is one or two calls to the scheduler, `render` none. Sites count those: a link makes a
handful in its life, the commands that show a run make none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.base import JobEnd, JobRequest
from hpc_grpo.launch.place.slurm import sbatch, text
from hpc_grpo.launch.place.slurm.text import WAITING_STATES, Ask, minutes, output_of

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig

_FINAL_STATES = frozenset(
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"]
)


@dataclass(frozen=True)
class SlurmQueue:
    """The queue of this cluster, as a `JobQueue`; `ask` runs Slurm's commands, but for sbatch."""

    ask: Ask = output_of

    def render(self, request: JobRequest) -> str:
        return sbatch.render(request)

    def submit(self, request: JobRequest) -> str:
        return sbatch.submit(request)

    def start_estimate(self, request: JobRequest, deadline_s: float = 60.0) -> str:
        return sbatch.start_estimate(sbatch.render(request), deadline_s)

    def show(self, job_id: str) -> SlurmJob | None:
        try:
            shown = self.ask(["scontrol", "show", "job", job_id])
        except LaunchError as error:
            if "Invalid job id" in str(error):  # forgotten, some minutes after its end
                return None
            raise
        records = (record for record in text.records(shown) if record.get("JobId") == job_id)
        return next((SlurmJob(job_id, record, self.ask) for record in records), None)

    def end_of(self, job_id: str) -> JobEnd:
        state = self._final_state(job_id)
        by = re.search(r"by (\d+)", state)
        return JobEnd(
            state,
            by_user=state.startswith("CANCELLED") and (by is None or int(by[1]) == os.getuid()),
            at_time_limit=state.startswith("TIMEOUT"),
            lost_a_node=state.startswith("NODE_FAIL"),
        )

    def _final_state(self, job_id: str) -> str:
        """Return its end as sacct says it ("CANCELLED by 1000"), else as scontrol does; "" if neither knows."""
        try:
            state = self.ask(["sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"]).partition("\n")[0].strip()
            if state.partition(" ")[0] in _FINAL_STATES:
                return state
        except LaunchError:
            pass  # no accounting on this site
        # Accounting may be behind.
        try:
            job = self.show(job_id)
        except LaunchError:
            return ""
        return job.state if job and job.state in _FINAL_STATES else ""

    def cancel(self, job_ids: Sequence[str]) -> None:
        self.ask(["scancel", "--quiet", *job_ids])

    def release(self, job_id: str) -> None:
        self.ask(["scontrol", "release", job_id])


@dataclass(frozen=True)
class SlurmJob:
    """A job in the `fields` of `scontrol show job`."""

    job_id: str
    fields: Mapping[str, str] = field(default_factory=dict)
    ask: Ask = output_of

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "")

    @property
    def is_over(self) -> bool:
        return self.state not in WAITING_STATES

    @property
    def output(self) -> str:
        path = self.fields.get("StdOut", "").strip()
        return path if path.startswith("/") else ""

    def granted(self, launch: LaunchConfig) -> LaunchConfig:
        slurm = launch.slurm
        num_nodes = int(self.fields.get("NumNodes", str(launch.num_nodes)).partition("-")[0])
        per_task = int(self.fields.get("CPUs/Task", "1"))
        values: dict[str, Any] = {
            "time_min": minutes(self.fields.get("TimeLimit", "")) or slurm.time_min,
            "partition": self.fields.get("Partition", slurm.partition),
            "account": self.fields.get("Account", slurm.account),
            "gpus_per_node": self._gpus_per_node(num_nodes) or slurm.gpus_per_node,
            "cpus_per_node": per_task if per_task > 1 else slurm.cpus_per_node,
        }
        options: dict[str, Any] = {
            "qos": self.fields.get("QOS"),
            "constraint": self.fields.get("Features"),
            "reservation": self.fields.get("Reservation"),
            "exclude": self.fields.get("ExcNodeList"),
            "exclusive": self.fields.get("OverSubscribe") == "NO",
            "mem": self._memory_per_node(num_nodes),
        }
        given = {key: value for key, value in slurm.extra.items() if not (options["mem"] and key.startswith("mem"))}
        values["extra"] = {**given, **{key: value for key, value in options.items() if value}}
        return launch.model_copy(update={"num_nodes": num_nodes, "slurm": slurm.model_copy(update=values)})

    def exclude_nodes(self, nodes: Sequence[str]) -> None:
        """Raises LaunchError where its partition would have too few nodes left: the job would wait for ever."""
        excluded = [*([self.fields["ExcNodeList"]] if "ExcNodeList" in self.fields else []), *nodes]
        names = self.fields["Partition"].split(",")
        partitions = [text.fields(self.ask(["scontrol", "show", "partition", name])) for name in names]
        members = {node for one in partitions if "Nodes" in one for node in text.hostnames(one["Nodes"], self.ask)}
        needed = int(self.fields.get("NumNodes", "1").partition("-")[0])
        if len(members - set(text.hostnames(",".join(excluded), self.ask))) < needed:
            raise LaunchError(f"without {', '.join(nodes)} its partition has fewer than {needed} nodes")
        self.ask(["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={','.join(excluded)}"])

    @property
    def _granted_tres(self) -> str:
        return self.fields.get("TRES", self.fields.get("AllocTRES", ""))

    def _gpus_per_node(self, num_nodes: int) -> int:
        """Return the GPUs of a node: asked for by node, else its share of those granted; 0 without any."""
        if asked := re.findall(r"gpu(?::[^:,=]+)?[:=](\d+)", self.fields.get("TresPerNode", "")):
            return sum(map(int, asked))
        granted = text.granted(self._granted_tres, "gres/gpu")
        return int(granted) // num_nodes if granted else 0

    def _memory_per_node(self, num_nodes: int) -> str | None:
        """Return what was granted, in MiB: Slurm shows "0" both for all memory and where nothing was asked for."""
        granted = re.fullmatch(r"([\d.]+)([KMGT]?)", text.granted(self._granted_tres, "mem"))
        if granted is None:
            return None
        mib = float(granted[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[granted[2]]
        return f"{int(mib / num_nodes)}M"
