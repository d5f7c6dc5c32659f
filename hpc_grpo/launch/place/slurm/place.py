"""The place of a process inside a Slurm job. The only module that reads `SLURM_*` variables for what they say."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from functools import cached_property

import psutil

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.base import Allocation, NodeResources, Place, place_kind
from hpc_grpo.launch.place.job_queue import JobQueue
from hpc_grpo.launch.place.local import count_nvidia_gpus, visible_gpus
from hpc_grpo.launch.place.slurm import text
from hpc_grpo.launch.place.slurm.jobs import SlurmQueue
from hpc_grpo.launch.place.slurm.srun import step_command, step_environment

_JOB_ID = "SLURM_JOB_ID"


@place_kind
class SlurmPlace(Place):
    """The job that this process is in, as a `Place`: agents are steps of it."""

    name = "slurm"

    @staticmethod
    def is_here(environ: Mapping[str, str]) -> bool:
        return _JOB_ID in environ

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.job_id = environ.get(_JOB_ID, "")
        self.queue: JobQueue | None = SlurmQueue()

    @cached_property
    def _shown(self) -> dict[str, str]:
        """Ask for the job's fields, once: an answer is kept, a failure is not."""
        job_id = self.job_id
        records = text.records(text.output_of(["scontrol", "show", "job", job_id]))
        found = next((record for record in records if record.get("JobId") == job_id), records[0])
        # Not SLURM_JOB_NODELIST: in a shell that srun attached to the job it names the nodes of that step alone.
        if "NodeList" not in found:
            raise LaunchError(f"Job {job_id} has no nodes now (state {found.get('JobState', '')}): is it over?")
        return found

    @cached_property
    def _allocation(self) -> Allocation:
        shown = self._shown
        nodes = tuple(text.hostnames(shown["NodeList"]))
        # A step of srun --pty lacks the variable.
        evenly = str(max(1, int(shown.get("NumCPUs", "0")) // len(nodes)))
        cpus = text.counts_per_node(self._environ.get("SLURM_JOB_CPUS_PER_NODE") or evenly, len(nodes))
        this_node = self._environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        gpus_of_a_step(shown, len(nodes))  # raises now, not when the first step starts
        return Allocation(
            job_id=self.job_id,
            nodes=nodes,
            num_cpus=cpus,
            this_node=this_node if this_node in nodes else None,
            ends_at=text.unix_time(shown.get("EndTime", "")),
        )

    def allocation(self) -> Allocation:
        return self._allocation

    def node_resources(self) -> NodeResources:
        cpus = int(self._environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
        gpus = self._environ.get("SLURM_GPUS_ON_NODE")
        if gpus is not None:
            return NodeResources(cpus, int(gpus))
        if (visible := visible_gpus(self._environ)) is not None:
            return NodeResources(cpus, visible)
        # A site without GRES for GPUs gives whole nodes. On a part of a node the other GPUs are another job's.
        found = count_nvidia_gpus()
        return NodeResources(cpus, found if found and cpus >= self._cpus_of_node() else 0)

    def _cpus_of_node(self) -> int:
        """Return how many CPUs a job on the whole node has: its cores, or its threads where Slurm counts those."""
        name = self._environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        try:
            shown = text.fields(text.output_of(["scontrol", "show", "node", name]))
        except LaunchError:
            shown = {}
        return int(shown.get("CPUEfctv") or shown.get("CPUTot") or psutil.cpu_count(logical=False) or 0)

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        nodes = self._allocation.nodes
        num_cpus = self._allocation.num_cpus[nodes.index(node)]
        return step_command(node, num_cpus, gpus_of_a_step(self._shown, len(nodes)), command)

    def start_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        return step_environment(environ)

    def is_node_failure(self, said: str) -> bool:
        return "node failure" in said.lower()


def gpus_of_a_step(job: Mapping[str, str], num_nodes: int) -> int | None:
    """Return the GPUs that a step on one node has to ask for; None where it inherits the right number.

    Raises LaunchError where some node would have none. A step inherits what the job asked for, which is right where
    that was by node. After --gpus it would ask for the job's total, after --gpus-per-task for one task's share, and
    where they came with --exclusive for none: then it has to ask for an even share of what was granted.
    """
    total = text.granted(job.get("TRES", job.get("AllocTRES", "")), "gres/gpu")
    asked_by_node = "gpu" in job.get("TresPerNode", "")
    asked_otherwise = any("gpu" in job.get(name, "") for name in ("TresPerJob", "TresPerTask"))
    if not total or (asked_by_node and not asked_otherwise):
        return None
    if int(total) < num_nodes:
        raise LaunchError(f"The job has {total} GPUs on {num_nodes} nodes; ask by node, with --gpus-per-node.")
    return int(total) // num_nodes
