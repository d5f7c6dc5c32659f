"""`hpc-grpo submit --sweep`: a run for each cell, submitted as one Slurm array."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_grpo.cli.request import Request, load_request
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.chain.submit import attempt_command, complete_until_queued, submit_runs
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.place.job_queue import TASK, JobQueue, JobRequest
from hpc_grpo.launch.sweep import grid, link_cells
from hpc_grpo.preflight.inputs import refuse_what_fails
from hpc_grpo.run.lock import refuse_if_held
from hpc_grpo.run.paths import CELLS, RunDir
from hpc_grpo.system.readable import table


@dataclass(frozen=True)
class Sweep:
    """The cells of a sweep by name; their runs are folders of `root`. `job` is the array with a task for each cell."""

    root: Path
    cells: Mapping[str, Request]
    job: JobRequest

    @property
    def runs(self) -> list[RunDir]:
        return [RunDir(request.config.run_path) for request in self.cells.values()]

    def submit(self, queue: JobQueue, driver: str, accepts_changes: bool) -> str:
        """Freeze the runs, and queue those that are not complete as one array. Return its id, "" if all are complete.

        Raises ConfigError if a run is held, or would fail in its job.
        """
        for run, request in zip(self.runs, self.cells.values(), strict=True):
            refuse_if_held(run)
            refuse_what_fails(request.config, accepts_changes=accepts_changes)
        with ExitStack() as stack:
            for run, request in zip(self.runs, self.cells.values(), strict=True):
                stack.enter_context(complete_until_queued(run))
                freeze(request.config, sys.argv, request.overrides, accepts_changes=accepts_changes)
            runs = [run for run in self.runs if not run.is_complete()]
            job = replace(self.job, tasks=link_cells(self.root, runs))
            return submit_runs(job, runs, driver, queue) if runs else ""

    def __str__(self) -> str:
        return table(("TASK", "RUN"), [(str(task), str(run.path)) for task, run in enumerate(self.runs)])


def load_sweep(
    config_name: str,
    words: Sequence[str],
    sweeps: Sequence[str],
    num_seeds: int | None,
    queue: JobQueue,
    driver: str,
) -> Sweep:
    """Load a config once for each cell. Raises ConfigError for a bad sweep, and for cells that are no valid config."""
    base = load_request(config_name, words).for_queue(queue)
    root = base.config.run_path
    if RunDir(root).has_config():
        raise ConfigError(f"{root} is a run, and a sweep needs a folder for its runs. Give another name: --name NAME")
    named = {
        name: [*words, *own, f"run.root={root}", f"run.name={name}"]
        for name, own in grid(sweeps, base.config.run.seed, num_seeds).items()
    }
    cells = {name: load_request(config_name, own).for_queue(queue) for name, own in named.items()}
    os.environ.update(base.exported)
    run = RunDir(root / CELLS / TASK)
    tasks = tuple(range(len(cells)))
    return Sweep(root, cells, JobRequest(run, base.config.launch, attempt_command(run, driver), tasks=tasks))
