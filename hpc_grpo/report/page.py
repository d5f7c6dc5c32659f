"""Write a report of runs as one HTML page that needs nothing else: pictures, attempts, a sample of rollouts.

What models and data wrote is hostile: the template escapes every value, pictures are images, and the page's own policy
lets no script run but the filter's, whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpc_grpo.metrics.record import REWARD
from hpc_grpo.metrics.usage import SlowestNode, slowest_node
from hpc_grpo.report.curves import Curve, curve_of, find_curves
from hpc_grpo.report.drawings import (
    Bar,
    Picture,
    draw_curves,
    draw_histogram,
    draw_phases,
    draw_timeline,
)
from hpc_grpo.report.explain import Explanation, explain_attempts
from hpc_grpo.report.records import RunRecords, read_records
from hpc_grpo.report.samples import Samples, take_samples
from hpc_grpo.report.status import RunSummary, summarize
from hpc_grpo.report.usage import draw_nodes, draw_processes
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import counted, decimal, duration, file_size, moment, printable, short_number

Metrics = dict[int, dict[str, Any]]

_HERE = Path(__file__).parent
_MAX_EVALS = 6
_LINKED = ("metrics.jsonl", "config.yaml", "rollouts", "attempts", "state.json")
_SYNC = (
    "lag/mean",
    "lag/max",
    "mismatch/logprob_abs_diff_mean",
    "mismatch/kl",
    "correction/clipped_fraction",
    "correction/ess",
)
_LEARNING = ("loss/policy", "policy/entropy", "grad_norm", "reward/zero_variance_fraction")
_SPEED = ("throughput/tokens_per_s", "time/step_s", "tokens/completion_mean", "tokens/truncated_fraction")
_NO_PARTS = (REWARD, "reward/zero_variance_fraction")
_NO_PHASES = ("time/step_s", "time/eta_s")


@dataclass(frozen=True)
class _Run:
    """Hold all that the page says of one run."""

    name: str
    records: RunRecords
    summary: RunSummary
    metrics: Metrics
    samples: Samples
    attempts: list[Explanation]
    links: list[tuple[str, str]]
    phases: list[tuple[str, float, float]]
    slowest: SlowestNode | None


def write_page(runs: Sequence[RunDir], path: Path) -> Path:
    """Write the report of the runs to `path`; its links to their files are relative, so that all may be moved."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    now = time.time()
    names = _names(runs)
    read = [_read(run, name, path.absolute().parent, now) for run, name in zip(runs, names, strict=True)]
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            printable(value, longest_line=None) if type(value) is str else value
        ),  # not our own Markup
    )
    environment.filters |= {
        "decimal": decimal,
        "duration": duration,
        "moment": moment,
        "short": short_number,
        "size": file_size,
    }
    script = (_HERE / "page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = environment.get_template("page.html").render(
        runs=read,
        sections=_sections(read),
        steps=sorted({step for run in read for step in run.samples.steps}),
        script=script,
        script_digest=digest,
        now=now,
    )
    write_atomic(path, html, mode=0o600)
    return path


def phase_seconds(metrics: Metrics) -> dict[str, float]:
    """Sum what all steps spent in each phase, the longest first; "other" is what no phase covers."""
    totals: dict[str, float] = {}
    for line in metrics.values():
        for name in _phases_of(line):
            totals[name] = totals.get(name, 0.0) + line[f"time/{name}_s"]
    other = sum(line.get("time/step_s", 0.0) for line in metrics.values()) - sum(totals.values())
    return dict(sorted({**totals, "other": max(0.0, other)}.items(), key=lambda item: -item[1]))


def _read(run: RunDir, name: str, folder: Path, now: float) -> _Run:
    records = read_records(run)
    metrics = read_metrics(run.metrics)
    seconds = phase_seconds(metrics)
    whole = sum(seconds.values()) or 1.0
    return _Run(
        name=name,
        records=records,
        summary=summarize(records, now),
        metrics=metrics,
        samples=take_samples(run),
        attempts=explain_attempts(records, now),
        links=[
            (file, quote(os.path.relpath(run.path / file, folder))) for file in _LINKED if (run.path / file).exists()
        ],
        phases=[(phase, spent, spent / whole) for phase, spent in seconds.items()],
        slowest=slowest_node(metrics.values()),
    )


def _names(runs: Sequence[RunDir]) -> list[str]:
    """Return the folders' names, with as many of their parents' as tell all of them apart."""
    paths = [run.path.absolute().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def _sections(runs: Sequence[_Run]) -> list[tuple[str, list[Picture]]]:
    """Draw the page's pictures, by their headings; a section without any is left out."""
    learned = {curve.name for run in runs for curve in find_curves(run.metrics) if not curve.is_of_source}
    evals = sorted((name for name in learned if name.startswith("eval/")), key=lambda name: (len(name), name))
    parts = {
        name
        for run in runs
        for line in run.metrics.values()
        for name in line
        if name.startswith("reward/") and name.count("/") == 1 and name not in _NO_PARTS
    }
    sections = [
        ("What was learned", _curves(runs, [*sorted(learned - set(evals)), *evals[:_MAX_EVALS], *_LEARNING])),
        ("Parts of the reward", _curves(runs, sorted(parts))),
        ("Policy lag and mismatch", _curves(runs, _SYNC)),
        ("Speed and lengths", [*_curves(runs, _SPEED), *_histograms(runs)]),
        ("Where the time went", [picture for run in runs for picture in _time(run)]),
        ("CPU and memory", [picture for run in runs for picture in draw_processes(run.name, run.metrics)]),
        ("Attempts and jobs", _timeline(runs)),
    ]
    return [(heading, pictures) for heading, pictures in sections if pictures]


def _curves(runs: Sequence[_Run], names: Sequence[str]) -> list[Picture]:
    found: list[tuple[str, dict[str, Curve]]] = []
    for name in dict.fromkeys(names):
        curves = {run.name: curve for run in runs if (curve := curve_of(name, run.metrics)).steps}
        found.append((name, curves))
    return [draw_curves(name, curves) for name, curves in found if curves]


def _histograms(runs: Sequence[_Run]) -> list[Picture]:
    """Draw the lengths of completions at the first step on record and at the last, one picture for each unit."""
    pictures = []
    for unit in ("tokens", "characters"):
        series = {
            f"{run.name}, step {step}": lengths
            for run in runs
            if run.samples.unit == unit
            for step, lengths in run.samples.lengths
        }
        if series:
            pictures.append(draw_histogram("Length of completions", unit, series))
    return pictures


def _time(run: _Run) -> list[Picture]:
    return [*_phases(run), *draw_nodes(run.name, run.metrics)]


def _phases(run: _Run) -> list[Picture]:
    """Draw the phases of a run's steps; none of a run that has recorded no phase."""
    steps = [step for step in run.metrics if step > 0]  # step 0 holds the start, beside which all others vanish
    names = [name for name, _, _ in run.phases if any(f"time/{name}_s" in run.metrics[step] for step in steps)]
    seconds = {name: [_finite(run.metrics[step].get(f"time/{name}_s")) for step in steps] for name in names[:8]}
    return [draw_phases(f"{run.name}: seconds of a step by phase", steps, seconds)] if seconds else []


def _timeline(runs: Sequence[_Run]) -> list[Picture]:
    """Draw when jobs waited and attempts ran; what a row is called says which nodes it had."""
    pictures = []
    for run in runs:
        submitted = {link.job_id: link.submitted_at for link in run.records.chain.links}
        bars = []
        for attempt in run.attempts:
            record = attempt.record
            row = f"attempt {record.attempt}, job {record.job_id}, {counted(len(record.nodes), 'node')}"
            if record.job_id in submitted:
                bars.append(Bar(row, submitted[record.job_id], record.started_at, "queued"))
            bars.append(Bar(row, record.started_at, record.started_at + (attempt.duration_s or 0.0), attempt.kind))
        if bars:
            pictures.append(draw_timeline(run.name, bars))
    return pictures


def _phases_of(line: Mapping[str, Any]) -> list[str]:
    return [
        name.removeprefix("time/").removesuffix("_s")
        for name, value in line.items()
        if name.startswith("time/") and name.endswith("_s") and name not in _NO_PHASES and not math.isnan(value)
    ]


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0
