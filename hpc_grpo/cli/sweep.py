"""`hpc-grpo submit --sweep`: a run for each cell, submitted as one Slurm array."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.cli.request import Request, load_request
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.chain.submit import attempt_command, refuse_if_trained, submit_runs, undone_unless_queued
from hpc_grpo.launch.freeze import freeze, is_over
from hpc_grpo.launch.place.job_queue import TASK, JobQueue, JobRequest
from hpc_grpo.launch.sweep import grid, link_cells, task_numbers
from hpc_grpo.preflight.inputs import refuse_what_fails
from hpc_grpo.run.owner import refuse_shared
from hpc_grpo.run.paths import CELLS, RunDir
from hpc_grpo.system.readable import table


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, folders of `root`. `values` are those in which they differ, by key and as JSON.

    `job` is the array with a task for each run that is not complete.
    """

    root: Path
    cells: Mapping[RunDir, Request]
    values: Mapping[RunDir, Mapping[str, str]]
    job: JobRequest

    def submit(self, queue: JobQueue, driver: str, accepts_changes: bool) -> str:
        """Freeze the runs, and queue those that are not complete as one array. Return its id.

        Raises ConfigError if a run is held, or would fail in its job.
        """
        for run in self.cells:
            refuse_if_trained(run, queue)
        refuse_what_fails([request.config for request in self.cells.values()], accepts_changes=accepts_changes)
        is_new = not self.root.exists()
        try:
            with ExitStack() as stack:
                for run, request in self.cells.items():
                    stack.enter_context(undone_unless_queued(run))
                    freeze(request.config, sys.argv, request.overrides, accepts_changes=accepts_changes)
                link_cells(self.root, self._numbers)
                runs = [run for run, task in self._numbers.items() if task in self.job.tasks]
                return submit_runs(self.job, runs, driver, queue)
        except BaseException:  # also at Ctrl+C
            if is_new and self.root.exists() and not any(run.path.exists() for run in self.cells):
                shutil.rmtree(self.root)
            raise

    @property
    def _numbers(self) -> dict[RunDir, int]:
        return task_numbers(self.root, [*self.cells])

    def __str__(self) -> str:
        tasks = {run: str(task) if task in self.job.tasks else "complete" for run, task in self._numbers.items()}
        rows = [(task, *self.values[run].values(), str(run.path)) for run, task in tasks.items()]
        return table(("TASK", *next(iter(self.values.values())), "RUN"), rows)


def load_sweep(
    config_name: str,
    words: Sequence[str],
    sweeps: Sequence[str],
    num_seeds: int | None,
    queue: JobQueue,
    driver: str,
) -> Sweep:
    """Load a config once for each cell.

    Raises ConfigError for a bad sweep, for cells that are no valid config, and for a folder that others may write.
    """
    base = load_request(config_name, words).for_queue(queue)
    root = base.config.run_path
    refuse_shared(root)
    if RunDir(root).has_config():
        raise ConfigError(f"{root} is a run, and a sweep needs a folder for its runs. Give another name: --name NAME")
    cells_by_name = grid(sweeps, words, base.config.run.seed, num_seeds)
    named = [[*words, *own, f"run.root={root}", f"run.name={name}"] for name, own in cells_by_name.items()]
    requests = [load_request(config_name, own).for_queue(queue) for own in named]
    cells = {RunDir(request.config.run_path): request for request in requests}
    own_values = (dict(word.split("=", 1) for word in own) for own in cells_by_name.values())
    values = dict(zip(cells, own_values, strict=True))
    os.environ.update(base.exported)
    task = RunDir(root / CELLS / TASK)
    numbers = task_numbers(root, [*cells])
    tasks = tuple(numbers[run] for run, request in cells.items() if not is_over(run, request.config))
    return Sweep(root, cells, values, JobRequest(task, base.config.launch, attempt_command(task, driver), tasks=tasks))
