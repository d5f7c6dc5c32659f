"""Compare runs: config keys that differ, last numbers, and newest evals prompt by prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.evals import EvalGroup, eval_prefix, paired_differences, rows_of
from hpc_grpo.metrics.record import REWARD
from hpc_grpo.report.page import names_of
from hpc_grpo.report.samples import files_by_step
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import flat, read_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import one_line, table

_WIDTH = 40


@dataclass(frozen=True)
class Comparison:
    """Several runs side by side; tuples are in the order of `runs`.

    `config` has the keys whose values differ. `results` has the metrics of each run's newest eval, with the bounds of
    their 95% intervals, and its last reward; NaN for a missing metric. `differences` has, for `B - A`, the difference
    of run B from the first run, A, on the same eval prompts. `notes` list pairs that cannot be compared, and why.
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
    keys = [flat(config.model_dump(mode="json")) for config in configs]
    every = sorted({key for own in keys for key in own} - {"run.name", "run.root"})
    values = {key: tuple(own.get(key) for own in keys) for key in every}
    last = [last_values(lines) for lines in metrics]
    differences: dict[str, dict[str, float]] = {}
    notes = []
    for at in range(1, len(runs)):
        pair, apart = f"{names[at]} - {names[0]}", dict[str, float]()
        shared = (name for name in configs[0].data.eval_sets if name in configs[at].data.eval_sets)
        for eval_set in ("", *shared):
            before, after = (_newest_eval(runs[each], eval_set, metrics[each]) for each in (0, at))
            where = f"eval set {eval_set!r}" if eval_set else "the eval set"
            if not (before and after):
                notes.append(f"{pair}: one of the two runs has no eval of {where}.")
            elif len({len(group.completions) for group in (*before, *after)}) > 1:
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
        config={key: own for key, own in values.items() if any(each != own[0] for each in own)},
        results={name: tuple(each.get(name, math.nan) for each in last) for name in sorted(set().union(*last))},
        differences=differences,
        notes=tuple(notes),
    )


def _lines(run: RunDir) -> dict[int, dict[str, Any]]:
    if lines := read_metrics(run.metrics):
        return lines
    raise ConfigError(f"Run {run.name} has no finished step to compare. `hpc-grpo status {run.path}` shows why.")


def last_values(lines: dict[int, dict[str, Any]]) -> dict[str, float]:
    """Return the last value of the reward and of each eval metric."""
    shown = (name for line in lines.values() for name in line if name == REWARD or name.startswith("eval/"))
    return {
        name: next((lines[step][name] for step in reversed(lines) if name in lines[step]), math.nan)
        for name in dict.fromkeys(shown)
    }


def _newest_eval(run: RunDir, eval_set: str, lines: Mapping[int, Any]) -> list[EvalGroup]:
    """Return the prompts of a set's newest eval, without evals of lost steps; empty without an eval."""
    files = files_by_step(run.eval_rollouts(0, eval_set).parent, "eval_step_")
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
