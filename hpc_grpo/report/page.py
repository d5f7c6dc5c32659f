"""The page of runs: one HTML file without network, or the same page for the dashboard.

Its data are plain JSON values from the runs' files. Texts of models and data are hostile: the page contains them as
JSON, and its script turns them into text nodes. The page's policy allows only the file's own scripts and styles, by
their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_grpo.config.yaml_text import read_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.evals import bounds_of
from hpc_grpo.metrics.record import PASS_AT_1, REWARD, phase_seconds
from hpc_grpo.report.explain import explain_attempts
from hpc_grpo.report.logs import DRIVER_LOG
from hpc_grpo.report.samples import evenly_spread, held_out, read_groups, rollout_files
from hpc_grpo.report.status import RunRecords, read_records, summarize
from hpc_grpo.report.watch import find_alerts
from hpc_grpo.run.files import read_record, write_atomic, writing
from hpc_grpo.run.frozen_config import flat
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import MetricColumns
from hpc_grpo.system.readable import counted, for_json, moment, printable

_HERE = Path(__file__).parent
MOST_ROLLOUT_BYTES, _MOST_STEPS = 8 << 20, 500
"""Limits of training rollouts in a page: bytes of all its runs, and number of steps."""
_MOST_POINTS = 1500
_LOG_LINES = 20_000
_WANDB_RUN = re.compile(r"W&B run [0-9a-f]{8}: (https://\S+)")
_ORDER = ("bringing up Ray", "loading the model", "generate", "train", "publish", "eval", "checkpoint")


def write_page(runs: Sequence[RunDir], path: Path) -> Path:
    """Write the report of the runs to `path`, readable only for this user: it contains prompts and completions."""
    now = time.time()
    data: list[dict[str, Any]] = []
    rollouts: list[tuple[str, Any]] = []
    for run, name in zip(runs, names_of(runs), strict=True):
        found = run_data(run, name, MetricColumns(run.metrics), now)
        chosen = _chosen(run, found["rollout_steps"], MOST_ROLLOUT_BYTES // len(runs))
        judged_by = judge_of(run)
        for step, file in chosen.items():
            groups = read_groups(file, judged_by, MOST_ROLLOUT_BYTES // len(runs) // len(chosen))
            rollouts.append((f"rollouts-{len(data)}-{step}", clean(groups)))
        data.append({**found, "num_rollout_steps": len(found["rollout_steps"]), "rollout_steps": list(chosen)})
    page = make_page({"runs": data, "written": now}, rollouts)
    with writing(path):
        write_atomic(path, page, mode=0o600)
    return path


def make_page(data: dict[str, Any], rollouts: Sequence[tuple[str, Any]] = (), connect: str = "'none'") -> str:
    """Return the HTML. Rollouts (element id, groups) come last, so the browser draws the curves first."""
    files = {"UPLOT": "vendor/uPlot.iife.min.js", "UPLOT_CSS": "vendor/uPlot.min.css", "LICENSE": "vendor/LICENSE"}
    files |= {"SCRIPT": "page.js", "STYLE": "page.css"}
    blocks = {key: (_HERE / name).read_text() for key, name in files.items()}
    hashes = {key: base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for key, text in blocks.items()}
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; connect-src {connect}; "
        f"style-src 'sha256-{hashes['UPLOT_CSS']}' 'sha256-{hashes['STYLE']}'; "
        f"script-src 'sha256-{hashes['UPLOT']}' 'sha256-{hashes['SCRIPT']}'"
    )
    values = {
        **blocks,
        "POLICY": policy,
        "TITLE": html.escape(", ".join(run["name"] for run in data["runs"][:3]) or "runs"),
        "DATA": _json(data),
        "ROLLOUTS": "\n".join(
            f'<script type="application/json" id="{name}">{_json(groups)}</script>' for name, groups in rollouts
        ),
    }
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], (_HERE / "page.html").read_text())


def names_of(runs: Sequence[RunDir]) -> list[str]:
    """Return the folders' names, with as many parents as needed to distinguish all."""
    paths = [run.path.absolute().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def judge_of(run: RunDir) -> dict[str, Any]:
    judged_by = read_values(run.config).get("eval")
    return judged_by if isinstance(judged_by, dict) else {}


def _chosen(run: RunDir, steps: Sequence[int], most_bytes: int) -> dict[int, Path]:
    """Return the files of `steps`, or of as many evenly spread steps as fit into `most_bytes`."""
    files = rollout_files(run, steps)
    total = max(1, sum(path.stat().st_size for path in files.values()))
    most = max(2, min(_MOST_STEPS, len(files) * most_bytes // total))
    return {step: files[step] for step in evenly_spread(list(files), most)}


def _json(values: Any) -> str:
    """Return JSON in which no text can end the script element."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def run_data(run: RunDir, name: str, columns: MetricColumns, now: float) -> dict[str, Any]:
    """Describe a run at `now`, in unix seconds. Reads `columns`. Omits rollouts of training."""
    columns.read()
    records = read_records(run)
    summary, last, config = summarize(records, now), columns.last(), flat(read_values(run.config))
    attempts = _attempts(records, columns, now)
    steps, metrics = columns.thinned(_MOST_POINTS)
    data = {
        **asdict(summary),
        "name": name,
        "seconds": sum(attempt["seconds"] or 0.0 for attempt in attempts),
        "headline": _headline(columns),
        "bounds": {key: ends for key in metrics if (ends := bounds_of(key))[0] in metrics},
        "evals": _evals(columns),
        "held_out": held_out(run, columns.steps),
        "attempts": attempts,
        "alerts": find_alerts(records, summary, last),
        "facts": _facts(records, {key: value for key, value in config.items() if value is not None}),
        "wandb": _wandb_url(run),
        "config": {key: "null" if value is None else str(value) for key, value in config.items()},
    }
    columns_of = {
        printable(key): [[None if value is None else float(f"{value:.6g}") for value in row] for row in rows]
        for key, rows in metrics.items()
        if key != "attempt"
    }
    rollout_steps = list(rollout_files(run, columns.steps))
    return {**clean(data), "steps": steps, "metrics": columns_of, "rollout_steps": rollout_steps}


def read_values(path: Path) -> dict[str, Any]:
    """Return the config's values as written: reading a run loads none of its code and refuses nothing."""
    with suppress(ConfigError):
        return read_yaml(path)
    return {}


def clean(value: Any) -> Any:
    """Return values as JSON holds them, with all texts printable, because others wrote them."""
    return for_json(value, partial(printable, longest_line=None))


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
    names = {name for name in columns.columns if name.startswith("eval/")}
    bounds = {bound for name in names for bound in bounds_of(name)}
    found = []
    for name in sorted(names - bounds):
        low, high = map(columns.points, bounds_of(name))
        points = [(step, value, low.get(step), high.get(step)) for step, value in columns.points(name).items()]
        found.append({"name": name.removeprefix("eval/"), "points": points})
    return found


def _attempts(records: RunRecords, columns: MetricColumns, now: float) -> list[dict[str, Any]]:
    times = defaultdict[float, dict[str, float]](dict)
    numbers = columns.columns.get("attempt", ())
    for name in (key for key in columns.columns if key.startswith("time/")):
        for number, seconds in zip(numbers, columns.columns[name], strict=False):
            if seconds > 0:
                times[number][name] = times[number].get(name, 0.0) + seconds
    submitted = {link.job_id: link.submitted_at for link in records.chain.links}
    found = []
    for attempt in explain_attempts(records, now):
        record, length = attempt.record, attempt.duration_s
        parts = {"bringing up Ray": record.phases_s.get("ray", record.phases_s.get("head", 0.0))}
        parts |= phase_seconds(times[record.attempt])
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
        for folder in reversed(run.attempt_dirs().values()):
            with suppress(OSError), (folder / DRIVER_LOG).open(errors="replace") as lines:
                for line in islice(lines, _LOG_LINES):
                    if match := _WANDB_RUN.search(line):
                        return match[1]
    return ""
