"""From a frozen run directory to one supervised attempt on the nodes at hand."""

from __future__ import annotations

import os
import sys

from hpc_grpo.config import load_resolved
from hpc_grpo.errors import EXIT_COMPLETE, EXIT_CRASH
from hpc_grpo.launch.chain import ChainLink
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.launch.holder import Hold
from hpc_grpo.launch.slurm import attempt_command
from hpc_grpo.launch.supervisor import Supervisor
from hpc_grpo.launch.topology import detect, step_command, step_environment
from hpc_grpo.run_dir import RunDir


def run_attempt(run: RunDir, driver: str, *, is_link: bool) -> int:
    """Run one attempt and return the exit code to end with. Raises HpcGrpoError.

    `driver` is a module or a .py file; it is run with the run directory as its argument. `is_link` says that a
    Slurm job was submitted for this attempt alone: then it may have successors.
    """
    if run.is_complete():
        print(f"The run in {run.path} is already complete; raise train.total_* to extend it.")
        return EXIT_COMPLETE
    config = load_resolved(run.config)
    topology = detect()
    if topology.this_node != topology.head:
        _move_to_head(step_command(topology, 0, _again(run, driver)))
    link = None
    if is_link and topology.source == "slurm":
        link = ChainLink(run, config, topology.job_id, attempt_command(run, driver))
        decision = link.decide()
        if link.successor_of or not decision.goes_on:
            print(decision.why, flush=True)
        if not decision.goes_on:
            return EXIT_CRASH if decision.gave_up else EXIT_COMPLETE
    number = run.next_attempt_number()
    hold = Hold.take(run, topology.job_id, number, ended_job=link.ended_job if link else None)
    try:
        if link:
            link.queue_successor()
        supervisor = Supervisor(run, config, topology, [*_driver_command(driver), str(run.path)], working_dir(run))
        try:
            return supervisor.run(successor_of=link.successor_of if link else "")
        finally:
            if link:
                link.finish(supervisor.record, was_signalled=supervisor.was_signalled)
    finally:
        hold.release()


def _driver_command(driver: str) -> list[str]:
    return [sys.executable, driver] if driver.endswith(".py") else [sys.executable, "-m", driver]


def _again(run: RunDir, driver: str) -> list[str]:
    return [sys.executable, "-m", "hpc_grpo.cli", "attempt", str(run.path), "--driver", driver]


def _move_to_head(command: list[str]) -> None:
    """Become a step on the head node: salloc leaves its shell on the login node."""
    os.execvpe(command[0], command, step_environment(os.environ))
