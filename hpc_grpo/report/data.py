"""The page's data of a run: plain JSON values, made from the run's files only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from hpc_grpo.metrics.evals import bounds_of
from hpc_grpo.metrics.record import PASS_AT_1, REWARD, phase_name
from hpc_grpo.report.explain import explain_attempts
from hpc_grpo.report.logs import DRIVER_LOG, attempt_dirs
from hpc_grpo.report.samples import held_out, rollout_files
from hpc_grpo.report.status import RunRecords, read_records, summarize
from hpc_grpo.report.watch import find_alerts
from hpc_grpo.run.files import read_record
from hpc_grpo.run.frozen_config import flat
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import MetricColumns
from hpc_grpo.system.readable import counted, moment, printable

_MOST_POINTS = 1500
_LOG_LINES = 20_000
_WANDB_RUN = re.compile(r"W&B run [0-9a-f]{8}: (https://\S+)")
_ORDER = ("bringing up Ray", "loading the model", "generate", "train", "publish", "eval", "checkpoint")


def run_data(run: RunDir, name: str, columns: MetricColumns, now: float) -> dict[str, Any]:
    """Describe a run at `now`, in unix seconds. Reads `columns`. Omits rollouts of training."""
    columns.read()
    records = read_records(run)
    config = {key: value for key, value in flat(read_values(run.config)).items() if value is not None}
    summary, last = summarize(records, now), columns.last()
    attempts = _attempts(records, columns, now)
    steps, metrics = columns.thinned(_MOST_POINTS)
    data = {
        **asdict(summary),
        "name": name,
        "seconds": sum(attempt["seconds"] or 0.0 for attempt in attempts),
        "headline": _headline(columns),
        "bounds": {key: ends for key in metrics if (ends := bounds_of(key))[0] in metrics},
        "evals": _evals(columns),
        "held_out": held_out(run),
        "rollout_steps": list(rollout_files(run)),
        "attempts": attempts,
        "alerts": find_alerts(records, summary, last),
        "facts": _facts(records, config),
        "wandb": _wandb_url(run),
        "config": {key: str(value) for key, value in config.items()},
    }
    columns_of = {
        printable(key): [[None if value is None else float(f"{value:.6g}") for value in row] for row in rows]
        for key, rows in metrics.items()
        if key != "attempt"
    }
    return {**clean(data), "steps": steps, "metrics": columns_of}


def read_values(path: Path) -> dict[str, Any]:
    """Return the config's values as written: reading a run loads none of its code and refuses nothing."""
    try:
        values = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def clean(value: Any) -> Any:
    """Return values with all texts printable, because others wrote them. Values that JSON cannot hold become None."""
    if isinstance(value, str):
        return printable(value, longest_line=None)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {clean(key): clean(item) for key, item in value.items()}
    return [clean(item) for item in value] if isinstance(value, list | tuple) else value


def _headline(columns: MetricColumns) -> dict[str, Any] | None:
    """Return the progress of the first of these metrics with a value: pass@1, the reward, the loss."""
    for measure, name in (("pass@1", PASS_AT_1), ("reward", REWARD), ("loss", "loss/policy")):
        if points := columns.points(name):
            steps = list(points)
            low, high = (columns.points(bound).get(steps[-1]) for bound in bounds_of(name))
            ends = {"from": points[steps[0]], "to": points[steps[-1]], "low": low, "high": high}
            return {"measure": measure, "metric": name, "begin": steps[0], "end": steps[-1], **ends}
    return None


def _evals(columns: MetricColumns) -> list[dict[str, Any]]:
    """Return each metric of the evals with its points: step, value and the bounds of its interval."""
    names = sorted(name for name in columns.columns if name.startswith("eval/"))
    bounds = {bound for name in names for bound in bounds_of(name)}
    found = []
    for name in names:
        if name in bounds:
            continue
        low, high = map(columns.points, bounds_of(name))
        points = [(step, value, low.get(step), high.get(step)) for step, value in columns.points(name).items()]
        found.append({"name": name.removeprefix("eval/"), "points": points})
    return found


def _attempts(records: RunRecords, columns: MetricColumns, now: float) -> list[dict[str, Any]]:
    phases: dict[tuple[float, str], float] = {}
    numbers = columns.columns.get("attempt", ())
    for name, column in columns.columns.items():
        if name.startswith("time/") and name not in ("time/step_s", "time/eta_s"):
            phase = phase_name(name.removeprefix("time/").removesuffix("_s"))
            for number, seconds in zip(numbers, column, strict=False):
                if seconds > 0:
                    phases[number, phase] = phases.get((number, phase), 0.0) + seconds
    submitted = {link.job_id: link.submitted_at for link in records.chain.links}
    found = []
    for attempt in explain_attempts(records, now):
        record, length = attempt.record, attempt.duration_s
        parts = {"bringing up Ray": sum(record.phases_s.get(phase, 0.0) for phase in ("head", "ray"))}
        parts |= {phase: seconds for (number, phase), seconds in phases.items() if number == record.attempt}
        if length is not None and (other := length - sum(parts.values())) > 0:
            parts["other"] = other
        found.append(
            {
                **asdict(record),
                "queued_s": max(0.0, record.started_at - submitted.get(record.job_id, record.started_at)),
                "seconds": length,
                "num_steps": attempt.num_steps,
                "kind": attempt.kind,
                "error": attempt.error,
                "advice": attempt.advice,
                "parts": [(name, parts[name]) for name in dict.fromkeys((*_ORDER, *parts)) if parts.get(name)],
            }
        )
    return found


def _facts(records: RunRecords, config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the main facts of a run that its records and its config (values by dotted key) contain."""

    def named(pattern: str) -> str:
        return ", ".join(str(value) for key, value in config.items() if re.fullmatch(pattern, key))

    sizes = [text.format(config[key]) for key, text in _SIZES.items() if key in config]
    source = read_record(records.run.source, dict) or {}
    git = source.get("git") or {}
    commit = f", commit {str(git.get('commit'))[:7]}{', changed since' if git.get('dirty') else ''}" if git else ""
    fork, newest = source.get("forked_from"), records.newest
    nodes = f"{counted(len(newest.nodes), 'node')} ({', '.join(newest.nodes[:4])})" if newest else ""
    facts = {
        "method": ", ".join(sizes),
        "model": named(r"model\.path"),
        "data": named(r"data\.train\.(mix\.\d+\.)?path"),
        "reward": named(r"rewards\.\d+\.name"),
        "environment": named(r"environment\.name"),
        "nodes": f"{nodes}, {counted(newest.num_gpus, 'GPU')} in all" if newest and newest.num_gpus else nodes,
        "forked from": f"step {fork['step']} of {fork['run']}" if fork else "",
        "began": moment(records.created_at) if records.created_at else "",
        "code": f"hpc-grpo {source['version']}{commit}" if "version" in source else "",
        "folder": str(records.run.path),
    }
    return [(name, value) for name, value in facts.items() if value]


_SIZES = {
    "task.name": "{}",
    "rollout.prompts_per_step": "{} prompts a step",
    "rollout.group_size": "{} completions a prompt",
    "train.lr": "learning rate {}",
    "run.seed": "seed {}",
}


def _wandb_url(run: RunDir) -> str:
    """Return the address that the driver printed; "" without one."""
    if run.wandb_id.exists():
        for folder in reversed(attempt_dirs(run).values()):
            try:
                with (folder / DRIVER_LOG).open(errors="replace") as lines:
                    for line in islice(lines, _LOG_LINES):
                        if match := _WANDB_RUN.search(line):
                            return match[1]
            except OSError:
                continue
    return ""
