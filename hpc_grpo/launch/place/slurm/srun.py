"""Steps on nodes of a Slurm job: those that run node agents, and shells for the user."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.job_queue import path_line, setup_lines
from hpc_grpo.launch.place.slurm.sbatch import extra_options, node_options, submission_environment

if TYPE_CHECKING:
    from hpc_grpo.config import LaunchConfig

_STEP = (
    "srun",
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # without it the step waits for CPUs that other steps have: for ever
    "--mem=0",  # else a second step finds the job's memory taken
    "--cpu-bind=none",
    "--export=ALL",
)


_SHELL_STEP = (*_STEP, "--whole")
"""All CPUs of the node that the job has: where a site or a user has SLURM_EXACT set, a shell would get one."""


def step_command(node: str, num_cpus: int, gpus: int | None, command: Sequence[str]) -> list[str]:
    """Wrap `command` so that it runs on a node of the job; `gpus` None: the step inherits the right number."""
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
    "SLURM_EXACT": "of the user's own steps: --cpus-per-task says what ours has",
    "SLURM_WHOLE": "of the user's own steps: --cpus-per-task says what ours has",
    "SLURM_TIMELIMIT": "ends the step before the job",
    "SLURM_LABELIO": "writes a task's number before every line of its reports",
    "SLURM_STDINMODE": "takes away the pipe that the step is told through",
    "SLURM_STDOUTMODE": "takes away the pipe that the step reports through",
}
"""Options that srun reads from the job's environment -> why a step of ours must not have it.

A name that ends in `*` is a prefix. The command line wins over a variable of the same option, not over the others.
"""


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that srun itself needs, without what would change the step."""
    prefixes = tuple(name[:-1] for name in _STEP_LEAKS if name.endswith("*"))
    return {key: value for key, value in environ.items() if key not in _STEP_LEAKS and not key.startswith(prefixes)}


def allocation_command(launch: LaunchConfig) -> list[str]:
    """Return the salloc for what `launch` asks for, with a shell on the first node; the nodes go back with the shell.

    Raises ConfigError for options that the schema owns.
    """
    nodes = {key.replace("_", "-"): value for key, value in node_options(launch).items()}
    wanted = {"job-name": "hpc-grpo-shell", **nodes, **extra_options(launch.slurm)}
    options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in wanted.items() if value]
    # Sites differ in where salloc leaves its shell: a step of our own is on the first node everywhere.
    return ["salloc", *options, *_SHELL_STEP, "--relative=0", "--pty", *_shell(setup_lines(launch), launch.python)]


def attach_command(job_id: str, node: str, python: str | None) -> list[str]:
    """Return the step that is a shell on a node of a job, beside what runs there; `python` is the job's, None: this."""
    return [*_SHELL_STEP, f"--jobid={job_id}", f"--nodelist={node}", "--pty", *_shell([], python)]


def become(command: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by one of the commands above. Raises LaunchError where Slurm is not installed.

    `environ` may be that of another allocation, whose settings must not leak into this one.
    """
    try:
        os.execvpe(command[0], list(command), submission_environment(environ))
    except FileNotFoundError as error:
        raise LaunchError(
            f"This machine has no Slurm (no {command[0]} on PATH). Without one, run `hpc-grpo train` right here."
        ) from error


def _shell(setup: Sequence[str], python: str | None) -> list[str]:
    """Return a login shell, where modules are defined; it finds the hpc-grpo of `python`, None: this one."""
    return ["bash", "-lc", "\n".join([*setup, path_line(python), "exec bash"])]
