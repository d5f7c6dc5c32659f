"""Report what runs have learned: in the terminal, as a PNG, and as one HTML page that needs nothing else.

What models and data wrote is hostile: the template escapes every value, pictures are images, and the page's own policy
lets no script run but the filter's, whose digest it names.
"""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.record import REWARD
from hpc_grpo.report.curves import RunData, figures, learning_curves
from hpc_grpo.report.explain import explain_attempts
from hpc_grpo.report.figure import Figure, draw_image, draw_text
from hpc_grpo.report.samples import before_and_after, take_samples
from hpc_grpo.report.status import read_records, summarize
from hpc_grpo.run.files import write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import decimal, duration, file_size, moment, printable, short_number
from hpc_grpo.system.say import say

_HERE = Path(__file__).parent
_LINKED = ("metrics.jsonl", "config.yaml", "rollouts", "attempts", "state.json")


def print_report(run_dir: RunDir, in_their_order: int = 0) -> Path:
    """Print a run's curves and completions; return the path of report.png. Raises ConfigError without metrics.

    Completions are those of a few prompts, newly solved ones first, or of the first `in_their_order` prompts.
    """
    metrics = read_metrics(run_dir.metrics)
    curves = learning_curves(metrics, with_sources=True)
    if not curves:
        raise ConfigError(
            f"{run_dir.metrics} holds no {REWARD} or eval yet: has the run finished a step? "
            f"Give the run's folder, <runs root>/<run name>."
        )
    say(draw_text(Figure(run_dir.path.name, learning_curves(metrics, with_sources=False))))
    for curve in curves:
        say(str(curve))
    picture = run_dir.path / "report.png"
    picture.write_bytes(draw_image(Figure(run_dir.path.name, curves), "png"))
    say(f"\n{before_and_after(run_dir, in_their_order)}\nPicture: {picture}")
    return picture


def write_page(runs: Sequence[RunDir], path: Path) -> Path:
    """Write the report of the runs to `path`; its links to their files are relative, so that all may be moved."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    now = time.time()
    data = []
    for run, name in zip(runs, names_of(runs), strict=True):
        records = read_records(run)
        summary, attempts = summarize(records, now), explain_attempts(records, now)
        data.append(RunData(name, records, summary, read_metrics(run.metrics), take_samples(run), attempts))
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Exactly str: Jinja's own Markup stays as it is.
        finalize=lambda value: printable(value, longest_line=None) if type(value) is str else value,
    )
    filters: dict[str, Callable[..., Any]] = {
        "decimal": decimal,
        "duration": duration,
        "link": lambda file: quote(os.path.relpath(file, path.absolute().parent)),
        "moment": moment,
        "short": short_number,
        "size": file_size,
        "svg": lambda figure: base64.b64encode(draw_image(figure, "svg")).decode(),
    }
    environment.filters |= filters
    script = (_HERE / "page.js").read_text()
    html = environment.get_template("page.html").render(
        runs=data,
        sections=figures(data),
        steps=sorted({step for run in data for step in run.samples.steps}),
        linked=_LINKED,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        now=now,
    )
    write_atomic(path, html, mode=0o600)
    return path


def names_of(runs: Sequence[RunDir]) -> list[str]:
    """Return the folders' names, with as many of their parents' as tell all of them apart."""
    paths = [run.path.absolute().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names
