"""Shells on compute nodes: the command lines that get one, in an allocation of its own or in a job that runs."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.place.slurm.sbatch import extra_options, setup_lines
from hpc_grpo.launch.place.slurm.srun import submission_environment

_STEP = [
    "srun",
    "--nodes=1",
    "--ntasks=1",
    "--overlap",  # without it the step waits for CPUs that other steps have: for ever
    "--mem=0",  # else a second step finds the job's memory taken
    "--cpu-bind=none",
    "--export=ALL",
]


def allocation_command(launch: LaunchConfig) -> list[str]:
    """salloc for what `launch.slurm` asks for, with a shell on the first node; the allocation ends with the shell.

    Raises ConfigError for options that the schema owns.
    """
    slurm = launch.slurm
    wanted: dict[str, object] = {
        "job-name": "hpc-grpo-shell",
        "nodes": slurm.num_nodes,
        "ntasks-per-node": 1,
        "time": slurm.time_min,
        "partition": slurm.partition,
        "account": slurm.account,
        "gpus-per-node": slurm.gpus_per_node or None,
        "cpus-per-task": slurm.cpus_per_node,
        **extra_options(slurm),
    }
    options = [f"--{key}" if value is True else f"--{key}={value}" for key, value in wanted.items() if value]
    # Sites differ in where salloc leaves its shell: a step of our own is on the first node everywhere.
    return ["salloc", *options, *_STEP, "--relative=0", "--pty", *_shell(setup_lines(launch), launch.python)]


def attach_command(job_id: str, node: str, python: str | None) -> list[str]:
    """A shell on one node of a job that runs, beside what runs there; `python` is the job's, None: this one."""
    return [*_STEP, f"--jobid={job_id}", f"--nodelist={node}", "--pty", *_shell([], python)]


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
    """A login shell, because modules are defined there; the hpc-grpo of `python`, or this one, is found in it although
    its profile resets PATH."""
    path = f"export PATH={shlex.quote(str(Path(python or sys.executable).parent))}:$PATH"
    return ["bash", "-lc", "\n".join([*setup, path, "exec bash"])]
