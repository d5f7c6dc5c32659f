"""From a frozen run directory to one supervised attempt on the nodes at hand."""

from __future__ import annotations

import os
import sys

from hpc_grpo.config import load_resolved
from hpc_grpo.errors import EXIT_COMPLETE
from hpc_grpo.launch.freeze import working_dir
from hpc_grpo.launch.supervisor import Supervisor
from hpc_grpo.launch.topology import detect, step_command, step_environment
from hpc_grpo.run_dir import RunDir


def run_attempt(run: RunDir, driver: str) -> int:
    """Run one attempt and return the exit code to end with. Raises HpcGrpoError.

    `driver` is a module or a .py file; it is run with the run directory as its argument.
    """
    if run.is_complete():
        print(f"The run in {run.path} is already complete; raise train.total_* to extend it.")
        return EXIT_COMPLETE
    config = load_resolved(run.config)
    topology = detect()
    if topology.this_node != topology.head:
        _move_to_head(step_command(topology, 0, _again(run, driver)))
    return Supervisor(run, config, topology, [*_driver_command(driver), str(run.path)], working_dir(run)).run()


def _driver_command(driver: str) -> list[str]:
    return [sys.executable, driver] if driver.endswith(".py") else [sys.executable, "-m", driver]


def _again(run: RunDir, driver: str) -> list[str]:
    return [sys.executable, "-m", "hpc_grpo.cli", "attempt", str(run.path), "--driver", driver]


def _move_to_head(command: list[str]) -> None:
    """Become a step on the head node: salloc leaves its shell on the login node."""
    os.execvpe(command[0], command, step_environment(os.environ))
