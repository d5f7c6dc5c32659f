"""Examining nodes from the login node: a short job runs the doctor on them, and leaves its findings in a file.

The scheduler is asked once, by sbatch. Waiting looks at the folder below run.root alone: sites forbid polling.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from hpc_grpo.config import to_yaml
from hpc_grpo.errors import HpcGrpoError, LaunchError
from hpc_grpo.launch.place.slurm import sbatch as slurm
from hpc_grpo.launch.place.slurm.jobs import cancel_jobs
from hpc_grpo.preflight.context import Context
from hpc_grpo.preflight.examination import NODES
from hpc_grpo.preflight.findings import Group, failure, has_failure
from hpc_grpo.preflight.folders import own_folder, remove_own_folder
from hpc_grpo.preflight.report import from_json
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir

_TIME_MIN = 5
_LOOK_S = 1.0
_LAST_LINES = 3
_RESULT, _ENDED = "result.json", "ended"


def examine_in_job(context: Context, num_nodes: int, wait_min: float, tell: Callable[[str], None]) -> list[Group]:
    """Submit the job, wait for its findings and give them; a failure that says how to go on where none come."""
    run = RunDir(own_folder(context.root))
    try:
        job_id = _submit(context, run, num_nodes, run.path / _RESULT, run.path / _ENDED)
    except (HpcGrpoError, OSError) as error:
        remove_own_folder(run.path)
        return _job_failure(str(error), "correct what it names: launch.*, run.root")
    log = run.slurm_log(job_id)
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    tell(f"Job {job_id} examines {nodes}; waiting up to {wait_min:g} min for it, then it is called off.")
    try:
        return _findings(run.path, log, job_id, wait_min)
    except KeyboardInterrupt:  # a job that nobody waits for is none to leave behind
        tell(_call_off(job_id))
        raise


def _findings(folder: Path, log: Path, job_id: str, wait_min: float) -> list[Group]:
    result, ended = folder / _RESULT, folder / _ENDED
    deadline = time.monotonic() + wait_min * 60
    while time.monotonic() < deadline:
        was_over = ended.exists()
        if result.exists():
            groups = from_json(result.read_text())
            if not has_failure(groups):  # else its log may tell more
                remove_own_folder(folder)
            return groups
        if was_over:
            return _job_failure(f"job {job_id} ended without findings: {_tail(log)}", f"its output is in {log}")
        time.sleep(_LOOK_S)
    return _job_failure(
        f"job {job_id} left no findings in {folder} within {wait_min:g} min: it waited in the queue, or its nodes do "
        f"not share that folder. {_call_off(job_id)}",
        f"--wait-min waits longer; its output, if it ran, is in {log}",
    )


def _call_off(job_id: str) -> str:
    try:
        cancel_jobs([job_id])
    except LaunchError as error:
        return f"It may still run ({error}): scancel {job_id}"
    return f"Job {job_id} was cancelled."


def _submit(context: Context, run: RunDir, num_nodes: int, result: Path, ended: Path) -> str:
    words = ["doctor", "--result", str(result)]
    if context.config is not None:
        absolute = context.config.run.model_copy(update={"root": context.root})
        write_atomic(run.config, to_yaml(context.config.model_copy(update={"run": absolute})))
        words.insert(1, str(run.config))
    launch = context.launch
    asked = launch.slurm.model_copy(update={"num_nodes": num_nodes, "time_min": _TIME_MIN})
    trap = f"trap {shlex.quote(f'touch {shlex.quote(str(ended))}')} EXIT"
    launch = launch.model_copy(update={"slurm": asked, "setup_lines": [trap, *launch.setup_lines]})
    return slurm.submit(launch, run, shlex.join(words), keep_shell=True)


def _job_failure(says: str, fix: str) -> list[Group]:
    return [Group(NODES, (failure("job", says, fix),))]


def _tail(log: Path) -> str:
    try:
        return " / ".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]) or "it printed nothing"
    except OSError as error:
        return f"its output cannot be read ({error.strerror})"
