"""The page of runs: one HTML file without network, or the same page for the dashboard.

Texts of models and data are hostile. The page contains them as JSON, and its script turns them into text nodes. The
page's policy allows only the file's own scripts and styles, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_grpo.report.data import clean, read_values, run_data
from hpc_grpo.report.samples import evenly_spread, read_groups, rollout_files
from hpc_grpo.run.files import write_atomic, writing
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import MetricColumns

_HERE = Path(__file__).parent
MOST_ROLLOUT_BYTES, _MOST_STEPS = 8 << 20, 500
"""Limits of training rollouts in a page: bytes of all its runs, and number of steps."""


def write_page(runs: Sequence[RunDir], path: Path) -> Path:
    """Write the report of the runs to `path`, readable only for this user: it contains prompts and completions."""
    now = time.time()
    data: list[dict[str, Any]] = []
    rollouts: list[tuple[str, Any]] = []
    for run, name in zip(runs, names_of(runs), strict=True):
        chosen = _chosen(run, MOST_ROLLOUT_BYTES // len(runs))
        judged_by = judge_of(run)
        for step, file in chosen.items():
            groups = read_groups(file, judged_by, MOST_ROLLOUT_BYTES // len(runs) // len(chosen))
            rollouts.append((f"rollouts-{len(data)}-{step}", clean(groups)))
        found = run_data(run, name, MetricColumns(run.metrics), now)
        data.append({**found, "num_rollout_steps": len(found["rollout_steps"]), "rollout_steps": list(chosen)})
    page = make_page({"runs": data}, rollouts)
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


def _chosen(run: RunDir, most_bytes: int) -> dict[int, Path]:
    """Return the files of all steps, or of as many evenly spread steps as fit into `most_bytes`."""
    files = rollout_files(run)
    total = max(1, sum(path.stat().st_size for path in files.values()))
    most = max(2, min(_MOST_STEPS, len(files) * most_bytes // total))
    return {step: files[step] for step in evenly_spread(list(files), most)}


def _json(values: Any) -> str:
    """Return JSON in which no text can end the script element."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
