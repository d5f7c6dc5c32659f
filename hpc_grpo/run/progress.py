"""A run's progress, written by its driver: state.json, a summary of the last finished step, and metrics.jsonl.

metrics.jsonl has a line for every step and is append-only (metrics/sinks.py), so any command may read it.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import filterfalse
from pathlib import Path
from typing import Any, Literal

from hpc_grpo.run.files import from_known, read_jsonl, read_jsonl_from, read_record, when_there_is_space, write_record
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import finite_or_none

_MOST_STEPS = 1 << 48
"""A larger number is no step: the disk changed it."""

Phase = Literal["starting", "training", "stopped", "complete"]


@dataclass(frozen=True)
class RunState:
    """The content of state.json. `reward`, `tokens_per_s` and `eta_s` are None before the first finished step.

    `heartbeat` is the unix time of the state. `step_p95_s`, `eval_p95_s` and `save_p95_s` are the 95th percentiles of a
    step (without eval and save), an eval and a checkpoint (driver/schedule.py). `longest_s` has the driver's longest
    time in each phase, over all attempts (run/pulse.py). `slow_node` describes a node that is notably slower than the
    others, "" for none.

    The current step last waited for `num_groups` groups of `waits_for` (rollouts or an eval). `sampled` and `graded`
    count the groups that are done; 0 if unknown. `trained` of the step's `num_microbatches` are trained. `on_step` says
    why `train.on_step` ended the run, or why it is off; "" for neither.
    """

    step: int
    total_steps: int
    attempt: int
    phase: Phase
    reward: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    step_p95_s: float | None = None
    eval_p95_s: float | None = None
    save_p95_s: float | None = None
    longest_s: dict[str, float] = field(default_factory=dict)
    slow_node: str = ""
    waits_for: str = ""
    num_groups: int = 0
    sampled: int = 0
    graded: int = 0
    trained: int = 0
    num_microbatches: int = 0
    on_step: str = ""
    heartbeat: float = field(default_factory=time.time)


def write_state(run_dir: RunDir, state: RunState) -> None:
    when_there_is_space(lambda: write_record(run_dir.state, asdict(state)), "state.json")


def read_state(run_dir: RunDir) -> RunState | None:
    """Return the last published state; None before the first one, and if it is damaged."""
    return read_record(run_dir.state, from_known(RunState))


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Return the surviving line of every step, in ascending order; {} without a file.

    Values that are no finite numbers, such as null, read as NaN. A line of a step undoes that step and later ones: they
    were trained again.
    """
    lines: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        step = line.get("step")
        if not (isinstance(step, int) and isinstance(line.get("attempt"), int)):
            continue  # the disk changed the line
        while lines and next(reversed(lines)) >= step:
            lines.popitem()
        # Interned: a hundred thousand lines share one copy of each name.
        lines[step] = {
            sys.intern(name): math.nan if finite_or_none(value) is None else value for name, value in line.items()
        }
    return lines


class MetricColumns:
    """metrics.jsonl by metric: each step once, in ascending order. `read` continues where it stopped.

    `columns[name][i]` is the value at `steps[i]`, NaN where there is no finite one. A column may end early. A line of a
    step undoes that step and later ones: an attempt trained them again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}

    def read(self) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._offset:
            self._start_over()
        for offset, line in read_jsonl_from(self._path, self._offset):
            self._offset = offset
            step = line.pop("step", None)
            if isinstance(step, int) and 0 <= step < _MOST_STEPS and isinstance(line.get("attempt"), int):
                self._add(step, line)

    def _add(self, step: int, line: dict[str, Any]) -> None:
        at = bisect_left(self.steps, step)
        del self.steps[at:]
        for column in self.columns.values():
            del column[at:]
        self.steps.append(step)
        for name, value in line.items():
            if (number := finite_or_none(value)) is not None:
                column = self.columns.setdefault(sys.intern(name), array("d"))
                column.extend([math.nan] * (at - len(column)))
                column.append(number)

    def points(self, name: str) -> dict[int, float]:
        """Return a metric by step, of the steps that have it."""
        column = self.columns.get(name, ())
        return {step: value for step, value in zip(self.steps, column, strict=False) if not math.isnan(value)}

    def last(self) -> dict[str, float]:
        """Return the metrics of the last step."""
        at = len(self.steps) - 1
        values = {name: column[at] for name, column in self.columns.items() if 0 <= at < len(column)}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def thinned(self, most: int) -> tuple[list[int], dict[str, list[Sequence[float | None]]]]:
        """Divide the steps into at most `most` ranges. Return the last step of each range, and rows for each metric.

        A row has one value per range. The first row has the means. Rows of minima and maxima follow if ranges have
        several steps.
        """
        width = max(1, math.ceil(len(self.steps) / most))
        starts = range(0, len(self.steps), width)
        found: dict[str, list[Sequence[float | None]]] = {}
        for name, column in self.columns.items():
            stretches = [list(filterfalse(math.isnan, column[at : at + width])) for at in starts]
            rows: list[Sequence[float | None]] = [[sum(own) / len(own) if own else None for own in stretches]]
            if width > 1:
                rows += ([of(own) if own else None for own in stretches] for of in (min, max))
            found[name] = rows
        return [self.steps[at : at + width][-1] for at in starts], found
