"""A sweep: one run for each cell of a grid of values, submitted together as one array of jobs.

Each run is a folder of the sweep. Task K of the array trains the run behind `.cells/K`. Follow-on jobs belong to a run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from typing import Any

from hpc_grpo.config.yaml_text import read_value
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import CELLS, RunDir

_FIXED = ("run.name", "run.root", "launch.")
_EMPTY = re.compile(r"(^|,)\s*(,|$)")
_NO_NAME = re.compile(r"[^A-Za-z0-9.+-]+")


def grid(
    sweeps: Sequence[str], overrides: Sequence[str], first_seed: int, num_seeds: int | None
) -> dict[str, list[str]]:
    """Return the overrides of each cell by its name: all combinations of `sweeps`, each KEY=VALUE,VALUE, and seeds.

    `overrides` are those of all cells. Raises ConfigError for another form, an empty value, a key or value that is
    given twice, and a key that cells cannot change.

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
                f"--sweep {sweep!r}: {key} is the same in all cells. Cells are named by their values, and all tasks of "
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
    cells: dict[str, list[str]] = {}
    for values in product(*axes.values()):
        name = _name(axes, values)
        if name in cells:
            raise ConfigError(
                f"--sweep: two cells have the name {name}. Give each value once. Values must differ in letters or "
                "digits, which name the cells."
            )
        cells[name] = [f"{key}={json.dumps(value, default=str)}" for key, value in zip(axes, values, strict=True)]
    return cells


def task_numbers(root: Path, runs: Sequence[RunDir]) -> dict[RunDir, int]:
    """Return the number of each run in the sweep: the number of its link, else the next free one."""
    linked = {link.readlink(): int(link.name) for link in (root / CELLS).glob("*")}
    free = count(max(linked.values(), default=-1) + 1)
    return {run: linked[run.path] if run.path in linked else next(free) for run in runs}


def link_cells(root: Path, numbers: Mapping[RunDir, int]) -> None:
    """Make the links of runs to which none has been made."""
    (root / CELLS).mkdir(exist_ok=True)
    for run, number in numbers.items():
        with suppress(FileExistsError):
            (root / CELLS / str(number)).symlink_to(run.path)


def _name(keys: Iterable[str], values: Sequence[Any]) -> str:
    last = [key.rpartition(".")[2] for key in keys]
    short = last if len({*last}) == len(last) else keys
    return "_".join(
        f"{key}-{_NO_NAME.sub('-', str(value)).strip('-')}" for key, value in zip(short, values, strict=True)
    )
