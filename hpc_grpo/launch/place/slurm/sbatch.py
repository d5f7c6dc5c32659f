"""Job scripts, as pure functions. submitit only formats the options of sbatch, and polls nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from hpc_grpo.config import LaunchConfig, SlurmConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.place.base import refuse_hosts
from hpc_grpo.launch.place.job_queue import TASK, JobRequest, job_python, path_line, setup_lines
from hpc_grpo.run.contract import WARNING_BEFORE_END_S
from hpc_grpo.run.source import entry


def render(request: JobRequest) -> str:
    """Return the job script. Raises ConfigError if `parameters` does, or if the job's Python lacks Ray."""
    from submitit.slurm.slurm import _make_sbatch_string

    program = entry(request.run) if request.command.startswith("attempt ") else ["-m", "hpc_grpo.cli"]
    # -E: no PYTHONPATH of the submitting shell or of a module reaches training or its start
    line = f"{shlex.quote(job_python(request.launch))} -E -u {shlex.join(program)} {request.command}"
    if not request.keeps_shell:  # Slurm signals the batch shell, which would not forward the signal
        line = f"exec {line}"
    script: str = _make_sbatch_string(command=line, folder=request.run.slurm_logs, **parameters(request))
    # TASK stands for the task's number. Its $ made shlex quote the path, so the number closes the quotes.
    shell, lines = "'\"$SLURM_ARRAY_TASK_ID\"'", script.splitlines(keepends=True)
    return "".join(line.replace(TASK, "%a" if line.startswith("#SBATCH") else shell) for line in lines)


def parameters(request: JobRequest) -> dict[str, Any]:
    """Return submitit's parameters. Raises ConfigError for hosts, like `extra_options`, and for % or \\ in the path."""
    launch, run = request.launch, request.run
    refuse_hosts(launch, "Slurm chooses the nodes of the job")
    if {"%", "\\"} & {*str(run.path)}:  # Such a job would end without output: Slurm changes the path.
        raise ConfigError(
            f"{run.path} holds % or \\, which Slurm replaces in the path of a job's output. Choose another run.name or "
            f"run.root."
        )
    # submitit would have SIGUSR2 sent to the steps, which kills a node agent's Ray before the end.
    further = {"signal": f"B:USR1@{WARNING_BEFORE_END_S}", "no-requeue": True, **extra_options(launch.slurm)}
    if launch.min_nodes is not None and launch.min_nodes < launch.num_nodes:
        further["no-kill"] = True  # Otherwise Slurm ends the job when it loses its first node.
    if request.after:
        further["dependency"] = f"afterany:{':'.join(request.after)}"
    if request.is_held:
        further["hold"] = True
    if request.tasks:
        limit = f"%{request.at_once}" if request.at_once else ""
        further["array"] = ",".join(map(str, request.tasks)) + limit
    # The job's mark, with its node, comes first: later lines may end the job.
    job_id = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}" if request.tasks else "$SLURM_JOB_ID"
    mark = shlex.quote(str(run.job_mark(job_id))).replace(job_id, f"'\"{job_id}\"'")
    return {
        "job_name": (run.path.parents[1] if request.tasks else run.path).name,  # of an array: the sweep's name
        "map_count": len(request.tasks) or None,
        **node_options(launch),
        "setup": [_IGNORE_WARNING, f"hostname > {mark} || true", *setup_lines(launch), path_line(launch.python)],
        "stderr_to_stdout": True,
        "use_srun": False,
        "wckey": "",  # submitit's default fails on sites that check it
        "additional_parameters": further,
    }


def node_options(launch: LaunchConfig) -> dict[str, Any]:
    """Return the options for nodes and time, under submitit's names, without unset ones."""
    slurm = launch.slurm
    has_tasks = bool({"ntasks", "ntasks-per-node"} & extra_options(slurm).keys())
    wanted = {
        "nodes": launch.num_nodes,
        "ntasks_per_node": None if has_tasks else 1,
        "time": slurm.time_min,
        "partition": slurm.partition,
        "account": slurm.account,
        "gpus_per_node": slurm.gpus_per_node or None,
        "cpus_per_task": slurm.cpus_per_node,
    }
    return {key: value for key, value in wanted.items() if value is not None}


def long_options(launch: LaunchConfig) -> dict[str, Any]:
    """Return all options of a job under Slurm's names. Raises ConfigError like `extra_options`."""
    nodes = {name.replace("_", "-"): value for name, value in node_options(launch).items()}
    return nodes | extra_options(launch.slurm)


def extra_options(slurm: SlurmConfig) -> dict[str, Any]:
    """Return `launch.slurm.extra` under Slurm's names. Raises ConfigError for options that have their own key."""
    given = {key: value for key, value in slurm.extra.items() if value is not False and value is not None}
    extra = {key.replace("_", "-"): value for key, value in given.items()}
    if owned := sorted(extra.keys() & _OWNED.keys()):
        told = "; ".join(f"{key}: {_OWNED[key]}" for key in owned)
        raise ConfigError(f"launch.slurm.extra must not hold {', '.join(owned)} ({told}).")
    return extra


_OWNED: dict[str, str] = {
    "nodes": "launch.num_nodes",
    "time": "launch.slurm.time_min",
    "partition": "launch.slurm.partition",
    "account": "launch.slurm.account",
    "gpus-per-node": "launch.slurm.gpus_per_node",
    "cpus-per-task": "launch.slurm.cpus_per_node",
    "signal": "the supervisor relies on it",
    "requeue": "resuming is a new job; a requeued one would run beside it",
    "output": "logs belong to the run directory",
    "error": "logs belong to the run directory",
    "wrap": "the job runs the supervisor",
    "array": "a run is a chain of jobs, one after the other; submit --sweep makes an array of runs",
    "dependency": "links of a chain depend on each other",
}


_IGNORE_WARNING = "trap '' USR1"
"""Slurm warns a short job at once. Ignore the signal, which would kill the job, until the supervisor handles it."""


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for sbatch, without the settings of the job that this process is in."""
    prefixes, needed = ("SLURM_", "SBATCH_", "SRUN_"), "SLURM_CONF"
    return {key: value for key, value in environ.items() if key == needed or not key.startswith(prefixes)}
