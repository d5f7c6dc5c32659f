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
    shown = _scontrol("show", "job", job_id)
    # Not SLURM_JOB_NODELIST: in a shell that srun attached to the job it names the nodes of that step alone.
    node_list = _field("NodeList", shown)
    if not node_list:
        raise LaunchError(f"Job {job_id} has no nodes now (state {_field('JobState', shown)}): is it over?")
    nodes = tuple(_scontrol("show", "hostnames", node_list).split())
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
    granted = re.search(r"\b(?:Alloc)?TRES=\S*\bgres/gpu=(\d+)", job_text)
    if granted is None or not re.search(r"\bTresPer(?:Job|Task)=\S*gpu", job_text):
        return None
    return int(granted[1]) // num_nodes


def step_command(topology: Topology, index: int, command: list[str]) -> list[str]:
    """Wrap `command` so that it runs on node `index`."""
    if topology.source == "local":
        return command
    gpus = topology.gpus_per_node
    return [
        "srun",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={topology.nodes[index]}",
        "--overlap",  # without it the step waits until the batch step's CPUs are free: for ever
        "--mem=0",  # else a second step finds the job's memory taken
        f"--cpus-per-task={topology.num_cpus[index]}",  # srun has not inherited it since 22.05
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        "--export=ALL",
        "--cpu-bind=none",
        "--unbuffered",
        "--disable-status",  # else a first Ctrl+C only prints the step's state
        "--job-name=hpc-grpo-node",
        *command,
    ]


_STEP_LEAKS: dict[str, str] = {
    "SLURM_CPU_BIND": "pins every process to one core",
    "SLURM_CPU_BIND_*": "pins every process to one core",
    "SLURM_MEM_BIND": "binds all memory of the node's processes to one domain",
    "SLURM_MEM_BIND_*": "binds all memory of the node's processes to one domain",
    "SLURM_MEM_PER_*": "contradicts --mem=0",
    "SLURM_CPUS_PER_*": "contradicts --cpus-per-task",
    "SRUN_CPUS_PER_TASK": "contradicts --cpus-per-task",
    "SLURM_TRES_PER_TASK": "contradicts --cpus-per-task",
    "SLURM_THREADS_PER_CORE": "contradicts --cpus-per-task, which counts all threads of the allocation",
    "SLURM_HINT": "contradicts --cpu-bind, and nomultithread --cpus-per-task",
    "SLURM_NTASKS_PER_*": "contradicts --ntasks=1",
    "SLURM_DISTRIBUTION": "spreads tasks; arbitrary wants a host file",
    "SLURM_DIST_PLANESIZE": "spreads tasks",
    "SLURM_GPUS": "of all nodes: a step on one node would ask for as many",
    "SLURM_GPUS_PER_TASK": "of one of the job's tasks: ours has the whole node",
    "SLURM_GPUS_PER_SOCKET": "asks beside --gpus-per-node",
    "SLURM_GPU_BIND": "hides GPUs of the node from its one task",
    "SLURM_GRES": "asks beside --gpus-per-node",
    "SLURM_STEP_GRES": "asks beside --gpus-per-node",
    "SLURM_EXCLUSIVE": "contradicts --overlap",
    "SLURM_TIMELIMIT": "ends the step before the job",
    "SLURM_LABELIO": "writes a task's number before every line of its reports",
    "SLURM_STDINMODE": "takes away the pipe that the step is told through",
    "SLURM_STDOUTMODE": "takes away the pipe that the step reports through",
}
"""What srun reads as options, from the job's environment -> why a step of ours must not have it.

A name that ends in `*` is a prefix. The command line wins over a variable of the same option, not over the others.
"""


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment srun itself needs, without what would change the step."""
    prefixes = tuple(name[:-1] for name in _STEP_LEAKS if name.endswith("*"))
    return {key: value for key, value in environ.items() if key not in _STEP_LEAKS and not key.startswith(prefixes)}


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch: inside a job, that job's own settings would leak into the new one."""
    prefixes = ("SLURM_", "SBATCH_", "SRUN_")
    return {k: v for k, v in environ.items() if k == "SLURM_CONF" or not k.startswith(prefixes)}


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


def _scontrol(*words: str) -> str:
    try:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"scontrol {' '.join(words)} failed: {error}") from error
    if done.returncode:
        raise LaunchError(f"scontrol {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout
