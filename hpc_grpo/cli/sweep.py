"""`hpc-grpo submit --sweep`: one run for each combination of values, submitted together as one array of jobs.

Each run is a folder of the sweep. Task K of the array trains the run behind `.cells/K`. Follow-on jobs belong to a run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any

from hpc_grpo.cli.request import Request, load_request
from hpc_grpo.config.yaml_text import read_value
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.chain.submit import attempt_command, refuse_if_trained, submit_runs, undone_unless_queued
from hpc_grpo.launch.freeze import freeze, is_over
from hpc_grpo.launch.place.job_queue import TASK, JobQueue, JobRequest
from hpc_grpo.preflight.inputs import refuse_what_fails
from hpc_grpo.run.owner import refuse_shared
from hpc_grpo.run.paths import CELLS, RunDir
from hpc_grpo.system.readable import table

_FIXED = ("run.name", "run.root", "launch.")
_EMPTY = re.compile(r"(^|,)\s*(,|$)")
_NO_NAME = re.compile(r"[^A-Za-z0-9.+-]+")


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep, folders of `root`. `values` has the values in which runs differ, as JSON by key.

    `numbers` are those of `task_numbers`. `job` is the array with a task for each run that is not complete.
    """

    root: Path
    runs: Mapping[RunDir, Request]
    values: Mapping[RunDir, Mapping[str, str]]
    numbers: Mapping[RunDir, int]
    job: JobRequest

    def submit(self, queue: JobQueue, driver: str, accepts_changes: bool) -> str:
        """Freeze the runs, and queue those that are not complete as one array. Return its id.

        Raises RunHeldError if an attempt trains a run, and ConfigError if a run would fail in its job.
        """
        for run in self.runs:
            refuse_if_trained(run, queue)
        refuse_what_fails([request.config for request in self.runs.values()], accepts_changes=accepts_changes)
        is_new = not self.root.exists()
        try:
            with ExitStack() as stack:
                for run, request in self.runs.items():
                    stack.enter_context(undone_unless_queued(run))
                    freeze(request.config, sys.argv, request.overrides, accepts_changes=accepts_changes)
                (self.root / CELLS).mkdir(exist_ok=True)
                for run, number in self.numbers.items():
                    with suppress(FileExistsError):
                        (self.root / CELLS / str(number)).symlink_to(run.path)
                queued = [run for run, number in self.numbers.items() if number in self.job.tasks]
                return submit_runs(self.job, queued, driver, queue)
        except BaseException:  # also at Ctrl+C
            if is_new and self.root.exists() and not any(run.path.exists() for run in self.runs):
                shutil.rmtree(self.root)
            raise

    def __str__(self) -> str:
        tasks = {run: str(task) if task in self.job.tasks else "complete" for run, task in self.numbers.items()}
        rows = [(task, *self.values[run].values(), str(run.path)) for run, task in tasks.items()]
        return table(("TASK", *next(iter(self.values.values())), "RUN"), rows)


def load_sweep(
    config_name: str, words: Sequence[str], sweeps: Sequence[str], num_seeds: int | None, queue: JobQueue, driver: str
) -> Sweep:
    """Load a config once for each run.

    Raises ConfigError for a bad sweep, for runs whose config is not valid, and for a folder that others may write to.
    """
    base = load_request(config_name, words).for_queue(queue)
    root = base.config.run_path
    refuse_shared(root)
    if RunDir(root).has_config():
        raise ConfigError(f"{root} is a run, and a sweep needs a folder for its runs. Give another name: --name NAME")
    runs, values = dict[RunDir, Request](), dict[RunDir, dict[str, str]]()
    for name, own in grid(sweeps, words, base.config.run.seed, num_seeds).items():
        request = load_request(config_name, [*words, *own, f"run.root={root}", f"run.name={name}"]).for_queue(queue)
        run = RunDir(request.config.run_path)
        runs[run], values[run] = request, dict(word.split("=", 1) for word in own)
    os.environ.update(base.exported)
    task = RunDir(root / CELLS / TASK)
    numbers = task_numbers(root, [*runs])
    tasks = tuple(numbers[run] for run, request in runs.items() if not is_over(run, request.config))
    job = JobRequest(task, base.config.launch, attempt_command(task, driver), tasks=tasks)
    return Sweep(root, runs, values, numbers, job)


def grid(
    sweeps: Sequence[str], overrides: Sequence[str], first_seed: int, num_seeds: int | None
) -> dict[str, list[str]]:
    """Return the overrides of each run by its name: all combinations of `sweeps`, each KEY=VALUE,VALUE, and seeds.

    `overrides` apply to all runs. Raises ConfigError for a sweep that is not KEY=VALUE,VALUE, an empty value, a key
    or value that is given twice, and a key that runs cannot change.

    >>> grid(["train.lr=1e-6,2e-6"], [], 0, None)
    {'lr-1e-06': ['train.lr=1e-06'], 'lr-2e-06': ['train.lr=2e-06']}
    """
    axes: dict[str, list[Any]] = {}
    given = {word.partition("=")[0] for word in overrides}
    for sweep in sweeps:
        key, separator, text = sweep.partition("=")
        if not separator or not key or _EMPTY.search(text):
            raise ConfigError(f"--sweep {sweep!r} must be a key and its values, none of them empty: train.lr=1e-6,2e-6")
        if key.startswith(_FIXED):
            raise ConfigError(
                f"--sweep {sweep!r}: {key} is the same in all runs. Runs are named by their values, and all tasks of "
                f"the array ask for the same nodes. Give it as {key}=VALUE, without --sweep."
            )
        if key in {*axes, *given} or (key == "run.seed" and num_seeds is not None):
            raise ConfigError(f"--sweep {sweep!r}: the values of {key} are given twice. Give them once.")
        try:
            axes[key] = read_value(f"[{text}]", f"--sweep {sweep!r}")
        except ConfigError as error:
            raise ConfigError(
                f"{error}\nQuote values with commas, braces or brackets: --sweep \"{key}='a, b','c'\""
            ) from None
    if num_seeds is not None:
        axes["run.seed"] = [first_seed + number for number in range(num_seeds)]
    runs: dict[str, list[str]] = {}
    for values in product(*axes.values()):
        name = _name(axes, values)
        if name in runs:
            raise ConfigError(
                f"--sweep: two runs have the name {name}. Give each value once. Values must differ in letters or "
                "digits, which name the runs."
            )
        runs[name] = [f"{key}={json.dumps(value, default=str)}" for key, value in zip(axes, values, strict=True)]
    return runs


def task_numbers(root: Path, runs: Sequence[RunDir]) -> dict[RunDir, int]:
    """Return the number of each run in the sweep: the name of its symlink in `.cells`, else the next free number."""
    linked = {link.readlink(): int(link.name) for link in (root / CELLS).glob("*")}
    free = count(max(linked.values(), default=-1) + 1)
    return {run: linked[run.path] if run.path in linked else next(free) for run in runs}


def _name(keys: Iterable[str], values: Sequence[Any]) -> str:
    last = [key.rpartition(".")[2] for key in keys]
    short = last if len({*last}) == len(last) else keys
    return "_".join(
        f"{key}-{_NO_NAME.sub('-', str(value)).strip('-')}" for key, value in zip(short, values, strict=True)
    )
