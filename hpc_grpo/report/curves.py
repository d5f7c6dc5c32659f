"""Choose what to draw of runs: curves of their metrics, lengths of completions, time, attempts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from hpc_grpo.metrics.evals import bounds_of
from hpc_grpo.metrics.record import PASS_AT_1, REWARD, phase_seconds
from hpc_grpo.metrics.usage import SlowestNode, node_seconds, slowest_node
from hpc_grpo.report.explain import Explanation
from hpc_grpo.report.figure import Bar, Figure, Series
from hpc_grpo.report.samples import Samples
from hpc_grpo.report.status import RunRecords, RunSummary
from hpc_grpo.system.readable import counted

Metrics = Mapping[int, Mapping[str, Any]]

_PASS_AT_K = re.compile("eval/(?:[^/@]+/)?pass@[0-9]+(?:/.+)?")
_PART = re.compile("reward/(?!(?:mean|zero_variance_fraction)$)[^/]+")
_LEARNING = ("loss/policy", "policy/entropy", "grad_norm", "reward/zero_variance_fraction")
_SYNC = (
    *("lag/mean", "lag/max", "mismatch/logprob_abs_diff_mean", "mismatch/kl"),
    *("correction/clipped_fraction", "correction/ess"),
)
_SPEED = ("throughput/tokens_per_s", "time/step_s", "tokens/completion_mean", "tokens/truncated_fraction")
_UNITS = {
    "cpu_cores": "CPU cores",
    "memory_gib": "memory in GiB",
    "gpu_memory_gib": "GPU memory in GiB",
    "gpu_utilization": "GPU utilization",
}
_MAX_EVALS, _MAX_PHASES, _MAX_NODES, _MAX_PROCESSES = 6, 8, 16, 14


@dataclass(frozen=True)
class RunData:
    """Everything that a report says of one run, under a name that no other run of the report has."""

    name: str
    records: RunRecords
    summary: RunSummary
    metrics: Metrics
    samples: Samples
    attempts: Sequence[Explanation]

    @property
    def slowest(self) -> SlowestNode | None:
        return slowest_node(self.metrics.values())

    def phases(self) -> dict[str, float]:
        """Sum what all steps spent in each phase, the longest first; "other" is what no phase covers."""
        totals: dict[str, float] = {}
        for line in self.metrics.values():
            for phase, seconds in phase_seconds(line).items():
                totals[phase] = totals.get(phase, 0.0) + seconds
        other = sum(line.get("time/step_s", 0.0) for line in self.metrics.values()) - sum(totals.values())
        return dict(sorted({**totals, "other": max(0.0, other)}.items(), key=lambda item: -item[1]))


def curve_of(name: str, metrics: Metrics, label: str = "") -> Series:
    """Return a metric over the steps that have it; its tuples are empty where no step has it."""
    points = {step: line[name] for step, line in metrics.items() if not math.isnan(line.get(name, math.nan))}
    low, high = (tuple(metrics[step][bound] for step in points if bound in metrics[step]) for bound in bounds_of(name))
    if not len(low) == len(high) == len(points):
        low = high = ()
    return Series(label or name, tuple(points), tuple(points.values()), low, high, marked=name.startswith("eval/"))


def learning_curves(metrics: Metrics, *, with_sources: bool) -> list[Series]:
    """Return the reward and every eval pass@k, those of single sources last; for SFT, which has neither, the loss."""
    names = _names(metrics)
    wanted = [name for name in (REWARD, PASS_AT_1) if name in names]
    others = {name for name in names if _PASS_AT_K.fullmatch(name)} - {PASS_AT_1}
    wanted += sorted(others, key=lambda name: (name.count("/"), name))
    shown = [name for name in wanted or ["loss/policy"] if with_sources or "/" not in name.partition("@")[2]]
    return [curve for name in shown if (curve := curve_of(name, metrics)).steps]


def figures(runs: Sequence[RunData]) -> dict[str, list[Figure]]:
    """Return the figures of runs by heading, each metric with a curve for each run; without those that are empty."""
    learned = {curve.name for run in runs for curve in learning_curves(run.metrics, with_sources=False)}
    evals = sorted((name for name in learned if name.startswith("eval/")), key=lambda name: (len(name), name))
    parts = {name for run in runs for name in _names(run.metrics) if _PART.fullmatch(name)}
    sections = {
        "What was learned": _curves(runs, [*sorted(learned - set(evals)), *evals[:_MAX_EVALS], *_LEARNING]),
        "Parts of the reward": _curves(runs, sorted(parts)),
        "Policy lag and mismatch": _curves(runs, _SYNC),
        "Speed and lengths": [*_curves(runs, _SPEED), _lengths(runs)],
        "Where the time went": [figure for run in runs for figure in (_phases(run), _nodes(run))],
        "CPU and memory": [_processes(run, unit) for run in runs for unit in _UNITS],
        "Attempts and jobs": [_timeline(run) for run in runs],
    }
    drawn = {heading: [each for each in own if each.series or each.bars] for heading, own in sections.items()}
    return {heading: own for heading, own in drawn.items() if own}


def _names(metrics: Metrics) -> set[str]:
    return {name for line in metrics.values() for name in line}


def _curves(runs: Sequence[RunData], names: Iterable[str]) -> list[Figure]:
    return [
        Figure(name, [curve for run in runs if (curve := curve_of(name, run.metrics, run.name)).steps])
        for name in dict.fromkeys(names)
    ]


def _lengths(runs: Sequence[RunData]) -> Figure:
    series = [Series(f"{run.name}, step {step}", (), own) for run in runs for step, own in run.samples.lengths.items()]
    return Figure("Length of completions", series, form="histogram", x_label="tokens", y_label="completions")


def _phases(run: RunData) -> Figure:
    """Return the seconds of each step by phase; step 0 has the start, beside which all others would vanish."""
    lines = {step: phase_seconds(line) for step, line in run.metrics.items() if step > 0}
    longest = [phase for phase in run.phases() if any(phase in line for line in lines.values())]
    series = [
        Series(phase, tuple(lines), tuple(line.get(phase, 0.0) for line in lines.values()))
        for phase in longest[:_MAX_PHASES]
    ]
    return Figure(f"{run.name}: seconds of a step by phase", series, form="stack", y_label="s")


def _nodes(run: RunData) -> Figure:
    """Return the mean seconds of a step by node, the slowest nodes first."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for line in run.metrics.values():
        for node, phases in node_seconds(line).items():
            for phase, spent in phases.items():
                seconds.setdefault(node, {}).setdefault(phase, []).append(spent)
    means = {node: {phase: fmean(own) for phase, own in phases.items()} for node, phases in seconds.items()}
    bars = []
    for node in sorted(means, key=lambda node: -sum(means[node].values()))[:_MAX_NODES]:
        ends = list(accumulate(means[node].values()))
        bars += [Bar(node, *span, phase) for phase, span in zip(means[node], pairwise([0.0, *ends]), strict=True)]
    return Figure(f"{run.name}: seconds of a step by node", bars=bars, form="shares", x_label="s")


def _processes(run: RunData, unit: str) -> Figure:
    """Return the cores, the memory or the GPUs of the processes that use most."""
    start = f"process/{unit}/"
    names = sorted(name for name in _names(run.metrics) if name.startswith(start))
    found = [curve for name in names if (curve := curve_of(name, run.metrics, name.removeprefix(start))).steps]
    largest = sorted(found, key=lambda curve: -fmean(curve.values))[:_MAX_PROCESSES]
    # By name, so that a process has the same colour in all figures.
    return Figure(f"{run.name}: {_UNITS[unit]} by process", sorted(largest, key=lambda curve: curve.name))


def _timeline(run: RunData) -> Figure:
    """Return when jobs waited and attempts ran, in hours; a row names its attempt, job and number of nodes."""
    submitted = {link.job_id: link.submitted_at for link in run.records.chain.links}
    spans = []
    for attempt in run.attempts:
        record = attempt.record
        row = f"attempt {record.attempt}, job {record.job_id}, {counted(len(record.nodes), 'node')}"
        if record.job_id in submitted:
            spans.append((row, submitted[record.job_id], record.started_at, "queued"))
        spans.append((row, record.started_at, record.started_at + (attempt.duration_s or 0.0), attempt.kind))
    first = min((begin for _, begin, _, _ in spans), default=0.0)
    bars = [Bar(row, (begin - first) / 3600, (end - first) / 3600, kind) for row, begin, end, kind in spans]
    return Figure(run.name, bars=bars, form="timeline", x_label="hours")
