"""`hpc-grpo cluster doctor`: decide which checks run where, and submit the job that examines nodes.

The job runs the doctor on its nodes and writes its findings to a file below run.root. A login node waits for this file
and does not poll the scheduler, since sites forbid polling.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable, Sequence

from hpc_grpo.config import to_yaml
from hpc_grpo.errors import ConfigError, HpcGrpoError, LaunchError
from hpc_grpo.launch.place import find_place, job_queue
from hpc_grpo.launch.place.base import Place
from hpc_grpo.launch.place.job_queue import JobRequest
from hpc_grpo.launch.place.slurm import partition
from hpc_grpo.preflight import login
from hpc_grpo.preflight.findings import GROUPS, Context, Groups, failure, has_failure, skipped
from hpc_grpo.preflight.folders import own_folder, remove_own_folder
from hpc_grpo.preflight.nodes import NODES, examine
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import counted

_JOB_TIME_MIN = 5
_LOOK_S = 1.0
_LAST_LINES = 3
_RESULT, _ENDED = "result.json", "ended"


def diagnose(context: Context, asked_nodes: int | None, wait_min: float, tell: Callable[[str], None]) -> Groups:
    """Return the findings about the login node and about `asked_nodes` nodes; None: the nodes of this place.

    On a login node, submits a job for `asked_nodes`, and cancels the job if it has no result after `wait_min` minutes.
    Raises ConfigError in a job that has fewer nodes.
    """
    place = find_place(context.environ)
    try:
        allocation = place.allocation()
    except LaunchError as error:
        return {NODES: {"allocation": failure(str(error), "leave this shell, and use a shell on a login node")}}
    num_nodes = max(asked_nodes or 1, context.launch.num_nodes)
    partitions = partition.ask_partitions() if place.queue is None else None
    found: Groups = {login.NAME: login.login_findings(context, num_nodes, partitions)}
    if partitions is None and asked_nodes is not None and asked_nodes > len(allocation.nodes):
        raise ConfigError(
            f"--nodes {asked_nodes}: job {allocation.job_id} has {len(allocation.nodes)} nodes. Give at most that, "
            f"or run the doctor on a login node."
        )
    if partitions is None or (asked_nodes is None and partitions.is_absent):
        return found | examine_here(place, allocation.nodes[:asked_nodes], context)
    if asked_nodes is None:
        why = "a login node: --nodes N examines N compute nodes in a short job"
        return found | {NODES: {"nodes": skipped(why)}}
    failed = [check for check, finding in found[login.NAME].items() if finding.status == "failure"]
    if stopped := [check for check in failed if check in login.NEEDED_BY_A_JOB]:
        why = f"no job was submitted; fix first: {', '.join(stopped)}"
        return found | {NODES: {"nodes": skipped(why)}}
    os.environ.update(context.environ)  # a job starts with what a .sh config exports
    return found | examine_in_job(context, asked_nodes, wait_min, tell)


def diagnose_in_job(context: Context) -> Groups:
    """Examine only the nodes: the work of the job that --nodes submits. Raises LaunchError outside an allocation."""
    place = find_place(context.environ)
    return examine_here(place, place.allocation().nodes, context)


def examine_here(place: Place, nodes: Sequence[str], context: Context) -> Groups:
    try:
        return examine(place, nodes, context, own_folder(context.root))
    except OSError as error:
        fix = "test the allocation by hand: srun --overlap hostname"
        return {NODES: {"answers": failure(f"no process could be started on the nodes: {error}", fix)}}


def examine_in_job(context: Context, num_nodes: int, wait_min: float, tell: Callable[[str], None]) -> Groups:
    """Submit the job, wait for its findings and return them, or a failure with a way to continue without them."""
    run = RunDir(own_folder(context.root))
    try:
        job_id = _submit(context, run, num_nodes)
    except (HpcGrpoError, OSError) as error:
        remove_own_folder(run.path)
        return {NODES: {"job": failure(str(error), "correct what the error names: launch.*, run.root")}}
    nodes = counted(num_nodes, "node")
    tell(f"Job {job_id} examines {nodes}; waiting up to {wait_min:g} min for it, then it is cancelled.")
    try:
        return _findings(run, job_id, wait_min)
    except KeyboardInterrupt:  # nobody waits for the job any more
        tell(_call_off(job_id))
        raise


def _submit(context: Context, run: RunDir, num_nodes: int) -> str:
    """Queue the doctor's own command as a job, and return its id. Its shell marks the folder when the job ends."""
    words = ["cluster", "doctor", "--result", str(run.path / _RESULT)]
    if context.config is not None:
        absolute = context.config.run.model_copy(update={"root": context.root})
        write_atomic(run.config, to_yaml(context.config.model_copy(update={"run": absolute})))
        words.insert(2, str(run.config))
    launch = context.launch
    slurm = launch.slurm.model_copy(update={"time_min": _JOB_TIME_MIN})
    trap = f"trap {shlex.quote(f'touch {shlex.quote(str(run.path / _ENDED))}')} EXIT"
    asked = {"num_nodes": num_nodes, "slurm": slurm, "setup_lines": [trap, *launch.setup_lines]}
    request = JobRequest(run, launch.model_copy(update=asked), shlex.join(words), keeps_shell=True)
    return job_queue().submit(request)


def _findings(run: RunDir, job_id: str, wait_min: float) -> Groups:
    """Wait for the findings of the job, or for its end without any."""
    result, ended, log = run.path / _RESULT, run.path / _ENDED, run.slurm_log(job_id)
    deadline = time.monotonic() + wait_min * 60
    while time.monotonic() < deadline:
        was_over = ended.exists()  # before looking for the result, which may be the job's last act
        if result.exists():
            groups = GROUPS.validate_python(json.loads(result.read_text()))
            if not has_failure(groups):  # after a failure, its log may tell more
                remove_own_folder(run.path)
            return groups
        if was_over:
            try:
                said = " / ".join(log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:])
            except OSError as error:
                said = f"its output cannot be read ({error.strerror})"
            says = f"job {job_id} ended without findings: {said or 'it printed nothing'}"
            return {NODES: {"job": failure(says, f"its output is in {log}")}}
        time.sleep(_LOOK_S)
    says = (
        f"job {job_id} left no findings in {run.path} within {wait_min:g} min: it waited in the queue, or its nodes do "
        f"not share that folder. {_call_off(job_id)}"
    )
    return {NODES: {"job": failure(says, f"raise --wait-min; if the job ran, its output is in {log}")}}


def _call_off(job_id: str) -> str:
    try:
        job_queue().cancel([job_id])
    except LaunchError as error:
        return f"It may still run ({error}): scancel {job_id}"
    return f"Job {job_id} was cancelled."
