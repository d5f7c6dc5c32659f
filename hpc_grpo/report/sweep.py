"""Results of the runs of a folder by cell: runs whose configs differ only in their seed are one cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from hpc_grpo.metrics.evals import few_interval
from hpc_grpo.metrics.record import REWARD
from hpc_grpo.report.compare import last_values
from hpc_grpo.run.frozen_config import flat, read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import UNKNOWN, table

_OF_A_RUN = ("run.name", "run.root", "run.seed")
_MAY_DIFFER = ("launch.", "metrics.")
"""Keys in which the runs of a cell may differ, because a run may be resumed with another value."""


@dataclass(frozen=True)
class Cell:
    """Runs that differ only in their seed. `values` are the keys in which cells differ, with this cell's values.

    `results` has the last reward and pass@1 of each set: the mean over the runs that have them, and the bounds of its
    95% interval; NaN for the bounds of one run. `steps` has the last step of each run, 0 before the first.
    """

    values: Mapping[str, Any]
    runs: tuple[str, ...]
    num_complete: int
    steps: tuple[int, ...]
    results: Mapping[str, tuple[float, float, float]]

    @property
    def name(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.values.items()) or "all"


@dataclass(frozen=True)
class SweepResults:
    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for cell in self.cells for name in cell.results))
        rows = [
            (
                cell.name,
                f"{cell.num_complete}/{len(cell.runs)}",
                f"{min(cell.steps)}" if len({*cell.steps}) == 1 else f"{min(cell.steps)}-{max(cell.steps)}",
                *(_shown(cell.results.get(name)) for name in names),
            )
            for cell in self.cells
        ]
        text = table(("CELL", "COMPLETE", "STEP", *names), rows)
        return f"{text}\n\nMeans over the runs of a cell, with their 95% interval (Student's t)."


def sweep_results(runs: Sequence[RunDir]) -> SweepResults:
    """Return the results of runs by cell, in the order of the runs."""
    keys = [flat(read_config(run).model_dump(mode="json")) for run in runs]
    every = sorted({key for values in keys for key in values if not key.startswith(_MAY_DIFFER)} - {*_OF_A_RUN})
    differing = [key for key in every if any(values.get(key) != keys[0].get(key) for values in keys)]
    cells: dict[str, list[int]] = {}
    for at, values in enumerate(keys):
        cells.setdefault(repr([values.get(key) for key in differing]), []).append(at)
    return SweepResults(
        tuple(
            _cell({key: keys[own[0]].get(key) for key in differing}, [runs[at] for at in own]) for own in cells.values()
        )
    )


def _cell(values: Mapping[str, Any], runs: Sequence[RunDir]) -> Cell:
    lines = [read_metrics(run.metrics) for run in runs]
    last = [last_values(own) for own in lines]
    names = dict.fromkeys(name for own in last for name in own if name == REWARD or name.endswith("/pass@1"))
    found = {name: [own[name] for own in last if not math.isnan(own.get(name, math.nan))] for name in names}
    return Cell(
        values=values,
        runs=tuple(run.name for run in runs),
        num_complete=sum(run.is_complete() for run in runs),
        steps=tuple(max(own, default=0) for own in lines),
        results={name: (fmean(own), *few_interval(own)) for name, own in found.items() if own},
    )


def _shown(result: tuple[float, float, float] | None) -> str:
    if result is None:
        return UNKNOWN
    mean, low, high = result
    return f"{mean:.3f}" if math.isnan(low) else f"{mean:.3f} [{low:.3f}, {high:.3f}]"
