"""Where the nodes come from. The only module that reads `SLURM_*`.

A `Topology` names the nodes of an attempt and says how a process is started on each. Two sources exist: a
Slurm allocation and this one machine. Further ones (two hosts by hand, pods) construct the same record.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.slurm.jobs import output_of


@dataclass(frozen=True)
class Topology:
    """The nodes of one attempt; `nodes[0]` is the head, where supervisor and driver run.

    `num_cpus[i]` belongs to `nodes[i]`. `this_node` is None when this process runs on none of them (a shell
    left on the login node by salloc). `ends_at` is in unix seconds; None: no limit known. `gpus_per_node` is what a
    step has to ask for; None: it inherits the right number.
    """

    source: Literal["slurm", "local"]
    job_id: str
    nodes: tuple[str, ...]
    num_cpus: tuple[int, ...]
    this_node: str | None
    ends_at: float | None = None
    gpus_per_node: int | None = None

    @property
    def head(self) -> str:
        return self.nodes[0]

    def only(self, names: Sequence[str]) -> Topology:
        """Those of the nodes that are among `names`."""
        kept = [pair for pair in zip(self.nodes, self.num_cpus, strict=True) if pair[0] in names]
        return replace(self, nodes=tuple(node for node, _ in kept), num_cpus=tuple(cpus for _, cpus in kept))


def detect(environ: Mapping[str, str] = os.environ) -> Topology:
    """The Slurm allocation this process is in, else this machine. Raises LaunchError if Slurm's tools fail."""
    if "SLURM_JOB_ID" in environ:
        return from_slurm(environ)
    return local()


def local() -> Topology:
    name = socket.gethostname()
    return Topology("local", f"local{os.getpid()}", (name,), (len(os.sched_getaffinity(0)),), name)


def from_slurm(environ: Mapping[str, str]) -> Topology:
    job_id = environ["SLURM_JOB_ID"]
    shown = output_of(["scontrol", "show", "job", job_id])
    # Not SLURM_JOB_NODELIST: in a shell that srun attached to the job it names the nodes of that step alone.
    node_list = _field("NodeList", shown)
    if not node_list:
        raise LaunchError(f"Job {job_id} has no nodes now (state {_field('JobState', shown)}): is it over?")
    nodes = tuple(output_of(["scontrol", "show", "hostnames", node_list]).split())
    # A step of srun --pty lacks the variable.
    counts = environ.get("SLURM_JOB_CPUS_PER_NODE") or str(max(1, int(_field("NumCPUs", shown) or 0) // len(nodes)))
    cpus = expand_counts(counts, len(nodes))
    this_node = environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    on_node = this_node if this_node in nodes else None
    return Topology("slurm", job_id, nodes, cpus, on_node, parse_end_time(shown), gpus_of_a_step(shown, len(nodes)))


def _field(name: str, job_text: str) -> str:
    """One field in the output of `scontrol show job`; "" if it is not there or "(null)"."""
    match = re.search(rf"\b{name}=(\S+)", job_text)
    return match[1] if match and match[1] != "(null)" else ""


def expand_counts(text: str, num_nodes: int) -> tuple[int, ...]:
    """Slurm's run-length form, one number per node.

    >>> expand_counts("72(x2),36", 3)
    (72, 72, 36)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise LaunchError(f"SLURM_JOB_CPUS_PER_NODE = {text!r} is not in a known form.")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts) if len(counts) == num_nodes else (counts[0],) * num_nodes


def parse_end_time(job_text: str) -> float | None:
    """The unix time of `EndTime=` in the output of `scontrol show job` (which prints local time)."""
    match = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", job_text)
    return time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S")) if match else None


def gpus_of_a_step(job_text: str, num_nodes: int) -> int | None:
    """GPUs that a step on one node has to ask for, of `scontrol show job`; None where it inherits the right number.

    A step inherits what the job asked for. Of a job that asked by node that is what we want; of one that asked for a
    total (--gpus) it is the total, of one that asked by task the share of one task. Such a job's GPUs count as evenly
    spread.
    """
    granted = re.search(r"\b(?:Alloc)?TRES=\S*\bgres/gpu(?::[^=,\s]+)?=(\d+)", job_text)
    if granted is None or not re.search(r"\bTresPer(?:Job|Task)=\S*gpu", job_text):
        return None
    if int(granted[1]) < num_nodes:
        raise LaunchError(f"The job has {granted[1]} GPUs on {num_nodes} nodes; ask by node, with --gpus-per-node.")
    return int(granted[1]) // num_nodes


@dataclass(frozen=True)
class NodeResources:
    num_cpus: int
    num_gpus: int


def node_resources(environ: Mapping[str, str] = os.environ) -> NodeResources:
    """CPUs and GPUs of this node that belong to the attempt: of the allocation, not of the machine."""
    cpus = int(environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))
    if "SLURM_GPUS_ON_NODE" in environ:
        return NodeResources(cpus, int(environ["SLURM_GPUS_ON_NODE"]))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return NodeResources(cpus, len([device for device in visible.split(",") if device not in ("", "-1")]))
    return NodeResources(cpus, 0 if "SLURM_JOB_ID" in environ else _count_nvidia_gpus())


def _count_nvidia_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=60, check=False)
    return listed.stdout.count("GPU ") if listed.returncode == 0 else 0
