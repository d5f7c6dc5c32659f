"""A sweep: one run for each cell of a grid of values, submitted together as one array of jobs.

Each run is a folder of the sweep. Task K of the array trains the run behind the link `.cells/K`. The jobs that follow a
task belong to its run alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from hpc_grpo.config.yaml_text import read_value
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import CELLS, RunDir

_FIXED = ("run.name", "run.root", "launch.")
_EMPTY = re.compile(r"(^|,)\s*(,|$)")
_NO_NAME = re.compile(r"[^A-Za-z0-9.+-]+")


def grid(sweeps: Sequence[str], first_seed: int, num_seeds: int | None) -> dict[str, list[str]]:
    """Return the overrides of each cell by its name: all combinations of `sweeps`, each KEY=VALUE,VALUE, and seeds.

    Raises ConfigError for another form, an empty value, a key or value that is given twice, and a key that cells cannot
    change.

    >>> grid(["train.lr=1e-6,2e-6"], 0, None)
    {'lr-1e-06': ['train.lr=1e-06'], 'lr-2e-06': ['train.lr=2e-06']}
    """
    axes: dict[str, list[Any]] = {}
    for sweep in sweeps:
        key, separator, text = sweep.partition("=")
        if not separator or not key or _EMPTY.search(text):
            raise ConfigError(f"--sweep {sweep!r} must be a key and its values, none of them empty: train.lr=1e-6,2e-6")
        if key.startswith(_FIXED):
            raise ConfigError(
                f"--sweep {sweep!r}: {key} is the same in all cells. Cells are named by their values, and all tasks of "
                f"the array ask for the same nodes. Give it as {key}=VALUE, without --sweep."
            )
        if key in axes or (key == "run.seed" and num_seeds is not None):
            raise ConfigError(f"--sweep {sweep!r}: the values of {key} are given twice. Give them once.")
        axes[key] = read_value(f"[{text}]", f"--sweep {sweep!r}")
    if num_seeds is not None:
        axes["run.seed"] = [first_seed + number for number in range(num_seeds)]
    cells: dict[str, list[str]] = {}
    for values in product(*axes.values()):
        name = _name(axes, values)
        if name in cells:
            raise ConfigError(
                f"--sweep: two cells have the name {name}. Give each value once. Letters and digits tell texts apart."
            )
        cells[name] = [f"{key}={json.dumps(value, default=str)}" for key, value in zip(axes, values, strict=True)]
    return cells


def link_cells(root: Path, runs: Sequence[RunDir]) -> tuple[int, ...]:
    """Give each run a number of its own in the sweep, and return the numbers. A run that has one keeps it."""
    folder = root / CELLS
    folder.mkdir(exist_ok=True)
    numbers = {str(link.readlink()): int(link.name) for link in folder.iterdir()}
    for run in runs:
        if str(run.path) not in numbers:
            number = max(numbers.values(), default=-1) + 1
            (folder / str(number)).symlink_to(run.path)
            numbers[str(run.path)] = number
    return tuple(numbers[str(run.path)] for run in runs)


def _name(keys: Iterable[str], values: Sequence[Any]) -> str:
    last = [key.rpartition(".")[2] for key in keys]
    short = last if len({*last}) == len(last) else keys
    return "_".join(
        f"{key}-{_NO_NAME.sub('-', str(value)).strip('-')}" for key, value in zip(short, values, strict=True)
    )
