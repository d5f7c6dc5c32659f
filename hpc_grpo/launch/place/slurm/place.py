"""The place of a process in a Slurm job, and steps on its nodes. Only this module reads values of `SLURM_*`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NoReturn

import psutil

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.environment import is_named
from hpc_grpo.launch.place.base import Allocation, NodeResources, Place, place_kind
from hpc_grpo.launch.place.job_queue import JobQueue, job_of_task, path_line, setup_lines
from hpc_grpo.launch.place.local import count_nvidia_gpus
from hpc_grpo.launch.place.slurm import text
from hpc_grpo.launch.place.slurm.jobs import SlurmQueue
from hpc_grpo.launch.place.slurm.sbatch import long_options, submission_environment
from hpc_grpo.system.gpus import visible_gpus

_JOB_ID = "SLURM_JOB_ID"
_BY_NODE = "Ask for GPUs by node, with --gpus-per-node."


@place_kind
class SlurmPlace(Place):
    """The job of this process, as a `Place`: agents are steps of the job."""

    name = "slurm"

    @staticmethod
    def is_here(environ: Mapping[str, str]) -> bool:
        return _JOB_ID in environ

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.job_id = environ.get(_JOB_ID, "")
        if "SLURM_ARRAY_TASK_ID" in environ:
            self.job_id = job_of_task(environ["SLURM_ARRAY_JOB_ID"], int(environ["SLURM_ARRAY_TASK_ID"]))
        self._this_node = environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
        self.queue: JobQueue | None = SlurmQueue()

    @cached_property
    def _shown(self) -> Mapping[str, str]:
        """Query the job's fields. Caches an answer, not a failure."""
        job = SlurmQueue().show(self.job_id)
        # Not SLURM_JOB_NODELIST: in a shell that srun attached to the job, it has only that step's nodes.
        if job is None or "NodeList" not in job.fields:
            state = f"state {job.state}" if job else "Slurm has forgotten it"
            raise LaunchError(
                f"{_JOB_ID} says that this shell is in job {self.job_id}, which has no nodes now ({state}). Leave the "
                f"shell of a job that is over. To use this machine alone: unset {_JOB_ID}."
            )
        return job.fields

    @cached_property
    def _num_cpus(self) -> Mapping[str, int]:
        """The job's nodes, with its CPUs on each."""
        nodes = text.hostnames(self._shown["NodeList"])
        # A step of srun --pty lacks the variable.
        evenly = str(max(1, int(self._shown.get("NumCPUs", "0")) // len(nodes)))
        cpus = text.counts_per_node(self._environ.get("SLURM_JOB_CPUS_PER_NODE") or evenly, len(nodes))
        return dict(zip(nodes, cpus, strict=True))

    def allocation(self) -> Allocation:
        nodes = tuple(self._num_cpus)
        if gpus_of_a_step(self._shown, len(nodes)) is not None:  # raises now, not when the first step starts
            shown = text.output_of(["scontrol", "--details", "show", "job", self._shown.get("JobId", self.job_id)])
            granted = re.findall(r"^ +Nodes=\S+ CPU_IDs=\S+ Mem=\S+ GRES=(\S*)", shown, re.MULTILINE)
            if len({sum(map(int, re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))) for gres in granted}) > 1:
                raise LaunchError(f"The job's nodes have unequal numbers of GPUs: {', '.join(granted)}. {_BY_NODE}")
        this_node = self._this_node if self._this_node in nodes else None
        return Allocation(self.job_id, nodes, this_node, text.unix_time(self._shown.get("EndTime", "")))

    def node_resources(self) -> NodeResources:
        # Slurm counts too few CPUs on a node if the job has others on other nodes; the step was asked for all of them.
        counts = (self._environ.get(f"SLURM_CPUS_{name}") for name in ("ON_NODE", "PER_TASK"))
        cpus = max(map(int, filter(None, counts)), default=len(os.sched_getaffinity(0)))
        gpus = self._environ.get("SLURM_GPUS_ON_NODE")
        if gpus is not None:
            # With --exclusive a job has all GPUs of its nodes, and its steps only the requested ones.
            asked = sum(map(int, re.findall(r"(\d+)(?=,|$)", self._environ.get("SLURM_GPUS_PER_NODE", ""))))
            return NodeResources(cpus, min(int(gpus), asked or int(gpus)))
        if "CUDA_VISIBLE_DEVICES" in self._environ:
            return NodeResources(cpus, len(visible_gpus(self._environ)))
        # A site without GRES for GPUs gives whole nodes. On a part of a node, other GPUs belong to another job.
        found = count_nvidia_gpus()
        return NodeResources(cpus, found if found and cpus >= self._cpus_of_node() else 0)

    def _cpus_of_node(self) -> int:
        """Return the CPUs of a job on the whole node: cores, or threads if Slurm counts threads."""
        try:
            shown = text.fields(text.output_of(["scontrol", "--all", "show", "node", self._this_node]))
        except LaunchError:
            shown = {}
        return int(shown.get("CPUEfctv") or shown.get("CPUTot") or psutil.cpu_count(logical=False) or 0)

    def start_command(self, node: str, command: Sequence[str]) -> list[str]:
        gpus = gpus_of_a_step(self._shown, len(self._num_cpus))
        return step_command(node, self._num_cpus[node], gpus, command)

    def start_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {name: value for name, value in environ.items() if not is_named(name, _STEP_LEAKS)}

    def is_node_failure(self, said: str) -> bool:
        return "node failure" in said.lower()


def gpus_of_a_step(job: Mapping[str, str], num_nodes: int) -> int | None:
    """Return the GPUs that a step on one node must request; None if it inherits the right number.

    Raises LaunchError if a node would have no GPU. A step inherits the job's request, which is right if the request was
    per node. After --gpus a step would request the job's total, after --gpus-per-task one task's share, and after
    --exclusive none. In these cases it must request an even share of the granted GPUs.
    """
    total = text.granted_gpus(job.get("TRES", job.get("AllocTRES", "")))
    asked_by_node = "gpu" in job.get("TresPerNode", "")
    asked_otherwise = any("gpu" in job.get(name, "") for name in ("TresPerJob", "TresPerTask"))
    if not total or (asked_by_node and not asked_otherwise):
        return None
    if int(total) < num_nodes:
        raise LaunchError(f"The job has {total} GPUs on {num_nodes} nodes. {_BY_NODE}")
    return int(total) // num_nodes


_STEP = ("srun", "--nodes=1", "--ntasks=1", "--overlap", "--mem=0", "--cpu-bind=none", "--export=ALL")
"""Without --overlap, a step waits forever for CPUs of other steps; without --mem=0, for their memory."""

_SHELL_STEP = (*_STEP, "--whole")
"""All CPUs of the job on the node. With SLURM_EXACT set by a site or a user, a shell would get one CPU."""


def step_command(node: str, num_cpus: int, gpus: int | None, command: Sequence[str]) -> list[str]:
    """Wrap `command` as a step on a node of the job. `gpus` None: the step inherits the right number."""
    return [
        *_STEP,
        f"--nodelist={node}",
        f"--cpus-per-task={num_cpus}",  # srun has not inherited it since 22.05
        *([f"--gpus-per-node={gpus}"] if gpus else []),
        "--unbuffered",
        "--disable-status",  # else a first Ctrl+C only prints the step's state
        "--job-name=hpc-grpo-node",
        *command,
    ]


_STEP_LEAKS: dict[str, str] = {
    **dict.fromkeys(("SLURM_CPU_BIND", "SLURM_CPU_BIND_*"), "pins every process to one core"),
    **dict.fromkeys(("SLURM_MEM_BIND", "SLURM_MEM_BIND_*"), "binds all memory of the node's processes to one domain"),
    "SLURM_MEM_PER_*": "contradicts --mem=0",
    **dict.fromkeys(("SLURM_CPUS_PER_*", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"), "contradicts --cpus-per-task"),
    "SLURM_THREADS_PER_CORE": "contradicts --cpus-per-task, which counts all threads of the allocation",
    "SLURM_HINT": "contradicts --cpu-bind, and nomultithread --cpus-per-task",
    "SLURM_NTASKS_PER_*": "contradicts --ntasks=1",
    "SLURM_DISTRIBUTION": "spreads tasks; arbitrary wants a host file",
    "SLURM_DIST_PLANESIZE": "spreads tasks",
    "SLURM_GPUS": "of all nodes: a step on one node would ask for as many",
    "SLURM_GPUS_PER_TASK": "of one of the job's tasks: ours has the whole node",
    **dict.fromkeys(("SLURM_GPUS_PER_SOCKET", "SLURM_GRES", "SLURM_STEP_GRES"), "asks beside --gpus-per-node"),
    "SLURM_GPU_BIND": "hides GPUs of the node from its one task",
    "SLURM_EXCLUSIVE": "contradicts --overlap",
    **dict.fromkeys(("SLURM_EXACT", "SLURM_WHOLE"), "of the user's own steps: --cpus-per-task says what ours has"),
    "SLURM_TIMELIMIT": "ends the step before the job",
    "SLURM_LABELIO": "writes a task's number before every line of its reports",
    "SLURM_STDINMODE": "takes away the pipe for orders to the step",
    "SLURM_STDOUTMODE": "takes away the pipe for reports of the step",
}
"""Options that srun reads from the job's environment -> why our steps must not have them.

A name that ends in `*` is a prefix. srun's command line overrides only a variable of the same option.
"""


def allocation_command(launch: LaunchConfig) -> list[str]:
    """Return the salloc command for `launch`: a shell on the first node. Raises ConfigError like `extra_options`."""
    wanted = {"job-name": "hpc-grpo-shell", **long_options(launch)}
    options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in wanted.items()]
    # Sites differ in where salloc's shell runs. Our own step always runs on the first node.
    return ["salloc", *options, *_SHELL_STEP, "--relative=0", "--pty", *_shell(setup_lines(launch), launch.python)]


def attach_command(job_id: str, node: str, python: str | None) -> list[str]:
    """Return the srun command of a shell on a running job's node. `python` is the job's Python; None: this Python."""
    if "_" in job_id:  # srun knows a task of an array by the number of its own job
        shown = text.records(text.output_of(["scontrol", "show", "job", job_id]))
        job_id = next((record["JobId"] for record in shown if "JobId" in record), job_id)
    return [*_SHELL_STEP, f"--jobid={job_id}", f"--nodelist={node}", "--pty", *_shell([], python)]


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by one of the commands above. Raises LaunchError if Slurm is not installed.

    `environ` may be that of another allocation, whose settings must not leak into this one.
    """
    try:
        os.execvpe(command[0], list(command), submission_environment(environ))
    except FileNotFoundError as error:
        raise LaunchError(
            f"This machine has no Slurm (no {command[0]} on PATH). Without Slurm, run `hpc-grpo train` on this machine."
        ) from error


def _shell(setup: Sequence[str], python: str | None) -> list[str]:
    """Return a login shell's command, with modules and the hpc-grpo of `python` on PATH. None: this Python."""
    return ["bash", "-lc", "\n".join([*setup, path_line(python), "exec bash"])]
