"""Compare runs: config keys that differ, last numbers, and newest evals prompt by prompt.

The runs of a sweep are compared by cell: runs whose configs differ only in their seed are one cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.evals import EvalGroup, eval_prefix, few_interval, paired_differences, rows_of
from hpc_grpo.metrics.record import REWARD
from hpc_grpo.report.page import names_of
from hpc_grpo.report.samples import EVAL_FILES
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import flat, read_config, read_inputs
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.run.source import functions_of
from hpc_grpo.system.readable import UNKNOWN, one_line, table

_WIDTH = 40
_MAY_DIFFER = ("launch.", "metrics.", "run.seed")
"""Keys in which the runs of a cell may differ: a run may be resumed with another value of the first two."""


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side; tuples are in the order of `runs`.

    `config` has the keys whose values differ, and files of functions. `results` has the metrics of each run's newest
    eval, with the bounds of their 95% intervals, and its last reward; NaN for a missing metric. `differences` has, for
    `B - A`, the difference of run B from the first run, A, on the same eval prompts. `notes` list pairs that cannot be
    compared, and why.
    """

    runs: tuple[str, ...]
    steps: tuple[int, ...]
    config: Mapping[str, tuple[Any, ...]]
    results: Mapping[str, tuple[float, ...]]
    differences: Mapping[str, Mapping[str, float]]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        rows = [(key, *(one_line(str(value), _WIDTH) for value in values)) for key, values in self.config.items()]
        parts = [table(("CONFIG", *self.runs), rows) if rows else "The configs do not differ."]
        heads = [f"{name} (step {step})" for name, step in zip(self.runs, self.steps, strict=True)]
        by_run = [{name: values[at] for name, values in self.results.items()} for at in range(len(self.runs))]
        parts.append(table(("RESULT", *heads), rows_of(by_run)))
        if self.differences:
            parts.append(table(("DIFFERENCE", *self.differences), rows_of([*self.differences.values()])))
        return "\n\n".join([*parts, *self.notes])


def compare_runs(runs: Sequence[RunDir]) -> Comparison:
    """Compare each run with the first. Raises ConfigError for fewer than two runs, or a run without a finished step."""
    if len(runs) < 2:
        raise ConfigError(f"{len(runs)} runs: a comparison needs two or more, such as runs/a and runs/b.")
    names, configs, metrics = names_of(runs), [read_config(run) for run in runs], [_lines(run) for run in runs]
    if len({run.path.absolute() for run in runs}) < len(runs):
        raise ConfigError("A run is given twice. Name each run once.")
    last = [last_values(lines) for lines in metrics]
    differences: dict[str, dict[str, float]] = {}
    notes = []
    for at in range(1, len(runs)):
        pair, apart = f"{names[at]} - {names[0]}", dict[str, float]()
        shared = (name for name in configs[0].data.eval_sets if name in configs[at].data.eval_sets)
        for eval_set in ("", *shared):
            before, after = (_newest_eval(runs[each], eval_set, metrics[each]) for each in (0, at))
            where = f"eval set {eval_set!r}" if eval_set else "the eval set"
            shared_prompts = {group.prompt for group in before} & {group.prompt for group in after}
            if not (before and after):
                notes.append(f"{pair}: one of the two runs has no eval of {where}.")
            elif shared_prompts and len({len(group.completions) for group in (*before, *after)}) > 1:
                notes.append(f"{pair}: eval.num_samples differs on {where}, so prompts cannot be paired.")
            elif found := paired_differences(before, after, configs[0].eval_settings(eval_set)):
                apart |= {
                    f"{eval_prefix(eval_set)}{key}": value
                    for key, value in found.items()
                    if not key.startswith("tokens_mean")
                }
            else:
                notes.append(f"{pair}: the prompts of {where} differ, so they cannot be paired.")
        if apart:
            differences[pair] = apart
    return Comparison(
        runs=tuple(names),
        steps=tuple(max(lines) for lines in metrics),
        config=_differing(runs, configs),
        results={name: tuple(each.get(name, math.nan) for each in last) for name in sorted(set().union(*last))},
        differences=differences,
        notes=tuple(notes),
    )


def _differing(runs: Sequence[RunDir], configs: Sequence[Config]) -> dict[str, tuple[Any, ...]]:
    """Return the keys whose values differ, besides name and folder, and the files of functions that differ."""
    keys = [flat(config.model_dump(mode="json")) for config in configs]
    for own, run, config in zip(keys, runs, configs, strict=True):
        files = read_inputs(run).fingerprints
        own |= {f"{key}: {file}": digest for key in functions_of(config) for file, digest in files.get(key, {}).items()}
    every = sorted(set[str]().union(*keys) - {"run.name", "run.root"})
    values = {key: tuple(own.get(key) for own in keys) for key in every}
    return {key: own for key, own in values.items() if any(each != own[0] for each in own)}


def _lines(run: RunDir) -> dict[int, dict[str, Any]]:
    if lines := read_metrics(run.metrics):
        return lines
    raise ConfigError(f"Run {run.name} has no finished step to compare. `hpc-grpo status {run.path}` shows why.")


def last_values(lines: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Return the last value of the reward and of each eval metric."""
    every = (metric for line in lines.values() for metric in line.items())  # a later value replaces an earlier one
    return {name: value for name, value in every if name == REWARD or name.startswith("eval/")}


def _newest_eval(run: RunDir, eval_set: str, lines: Mapping[int, Any]) -> list[EvalGroup]:
    """Return the prompts of a set's newest eval, without evals of lost steps; empty without an eval."""
    files = step_dirs(run.eval_rollouts(0, eval_set).parent, EVAL_FILES)
    step = max(files.keys() & lines.keys(), default=None)
    found = [] if step is None else sorted(read_jsonl(files[step]), key=lambda line: line["ordinal"])
    return [_group(list(completions)) for _, completions in groupby(found, lambda line: line["ordinal"])]


def _group(lines: Sequence[Mapping[str, Any]]) -> EvalGroup:
    first, is_graded = lines[0], all(line["solved"] is not None for line in lines)
    return EvalGroup(
        prompt=first["prompt"],
        source=first["source"],
        fields={"prompt": first["prompt"], "answer": first["answer"]},
        completions=tuple(line["completion"] for line in lines),
        rewards=tuple(line["reward"] for line in lines) if is_graded else (),
        solved=tuple(bool(line["solved"]) for line in lines),
        num_tokens=(0,),  # not on disk
        is_graded=is_graded,
    )


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
    found = _differing(runs, [read_config(run) for run in runs])
    differing = {key: values for key, values in found.items() if not key.startswith(_MAY_DIFFER)}
    cells: dict[str, list[int]] = {}
    for at in range(len(runs)):
        cells.setdefault(repr([values[at] for values in differing.values()]), []).append(at)
    return SweepResults(
        tuple(
            _cell({key: values[own[0]] for key, values in differing.items()}, [runs[at] for at in own])
            for own in cells.values()
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
