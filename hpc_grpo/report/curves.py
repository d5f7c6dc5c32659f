"""Show what a run has learned, from its files alone: curves, and completions before and after.

Nothing in the terminal needs colours: a job's log has none, and not every reader can tell them apart.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.evals import HIGH, LOW
from hpc_grpo.metrics.record import PASS_AT_1, REWARD
from hpc_grpo.report.drawings import curve_styles, thinned
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.readable import one_line
from hpc_grpo.system.say import say

_SHOWN_COMPLETIONS = 4
_SHOWN_CHARACTERS = 400
_LINE = "⠤"
_MARKS = "●■▲◆○□△◇"
"""One for each eval curve: evals have few points, and a mark says where they are."""

_USER_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)

_PASS_AT_K = re.compile("(eval/(?:[^/@]+/)?pass@[0-9]+)(?:/.+)?")
"""Matches pass@1 of a set; with what comes after the number, that of one of its sources."""


@dataclass(frozen=True)
class Curve:
    """Hold one metric over the steps that have it; all tuples have the same length.

    `low` and `high` bound its 95% interval, and are empty where it has none.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @property
    def is_eval(self) -> bool:
        return self.name.startswith("eval/")

    @property
    def is_of_source(self) -> bool:
        """Tell whether it is of one source of an eval set alone."""
        return self.is_eval and "/" in self.name.partition("@")[2]

    def __str__(self) -> str:
        bounds = f" [{self.low[-1]:.3f}, {self.high[-1]:.3f}]" if self.low else ""
        first = f"{self.values[0]:.3f} (step {self.steps[0]})"
        return f"{self.name}: {first} -> {self.values[-1]:.3f}{bounds} (step {self.steps[-1]})"


def print_report(run_dir: RunDir, in_their_order: int = 0) -> Path:
    """Print a run's curves and completions; return the path of report.png. Raises ConfigError without metrics.

    Completions are those of a few prompts, newly solved ones first, or of the first `in_their_order` prompts.
    """
    metrics = read_metrics(run_dir.metrics)
    curves = find_curves(metrics)
    if not curves:
        raise ConfigError(
            f"{run_dir.metrics} holds no {REWARD} or eval yet: has the run finished a step? "
            f"Give the run's folder, <runs root>/<run name>."
        )
    say(plot([curve for curve in curves if not curve.is_of_source]))
    for curve in curves:
        say(str(curve))
    picture = run_dir.path / "report.png"
    write_picture(curves, picture, run_dir.path.name)
    say(f"\n{before_and_after(run_dir, in_their_order)}\nPicture: {picture}")
    return picture


def find_curves(metrics: dict[int, dict[str, Any]]) -> list[Curve]:
    """Return the reward and every eval pass@k, those of sources last or, of a run with neither (SFT), the loss."""
    names = {name for line in metrics.values() for name in line}
    wanted = [name for name in (REWARD, PASS_AT_1) if name in names]
    others = [name for name in names if _PASS_AT_K.fullmatch(name) and name != PASS_AT_1]
    wanted += sorted(others, key=lambda name: (name.count("/"), name))
    if not wanted and "loss/policy" in names:
        wanted = ["loss/policy"]
    return [curve for curve in (curve_of(name, metrics) for name in wanted) if curve.steps]


def curve_of(name: str, metrics: dict[int, dict[str, Any]]) -> Curve:
    """Return a metric over the steps that have it; its tuples are empty where none has."""
    points = [(step, line[name]) for step, line in metrics.items() if not math.isnan(line.get(name, math.nan))]
    low, high = (
        tuple(metrics[step][bound] for step, _ in points if bound in metrics[step]) for bound in _bounds_of(name)
    )
    has_bounds = len(low) == len(high) == len(points)
    steps, values = (tuple(column) for column in zip(*points, strict=True)) if points else ((), ())
    return Curve(name, steps, values, low if has_bounds else (), high if has_bounds else ())


def _bounds_of(name: str) -> tuple[str, str]:
    """Return the names of a metric's bounds.

    >>> _bounds_of("eval/pass@1/gcd")
    ('eval/pass@1_low/gcd', 'eval/pass@1_high/gcd')
    """
    match = _PASS_AT_K.fullmatch(name)
    end = match.end(1) if match else len(name)
    return f"{name[:end]}{LOW}{name[end:]}", f"{name[:end]}{HIGH}{name[end:]}"


def plot(curves: Sequence[Curve], num_columns: int = 80, num_rows: int = 18) -> str:
    """Draw the curves over common axes, as lines of braille dots and, for evals, a mark at each point."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)  # not by this terminal: the output may go to a file
    plotext.plotsize(num_columns, num_rows)
    legend = []
    for curve in curves:
        plotext.plot(thinned(curve.steps), thinned(curve.values), marker="braille")
    for mark, curve in zip(_MARKS, (curve for curve in curves if curve.is_eval), strict=False):
        plotext.scatter(thinned(curve.steps), thinned(curve.values), marker=mark)
        legend.append(f"{mark} {curve.name}")
    legend += [f"{_LINE} {curve.name}" for curve in curves if not curve.is_eval]
    first, last = min(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    plotext.xticks(sorted({first, (first + last) // 2, last}))
    plotext.xlabel("step")
    lines = plotext.uncolorize(plotext.build()).splitlines()
    return "\n".join([*(line.rstrip() for line in lines), f"  {'   '.join(legend)}"])


def write_picture(curves: list[Curve], path: Path, title: str) -> None:
    # Not pyplot: it would look for a display and keep the figure in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve, (color, line) in zip(curves, curve_styles(), strict=False):
        steps, values, low, high = (thinned(row) for row in (curve.steps, curve.values, curve.low, curve.high))
        mark = "o" if curve.is_eval else None
        axes.plot(steps, values, color=color, linestyle=line, marker=mark, label=curve.name)
        if low:
            axes.fill_between(steps, low, high, color=color, alpha=0.12, linewidth=0)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def before_and_after(run_dir: RunDir, in_their_order: int = 0) -> str:
    """Compare the same held-out prompts at the first and at the last eval, newly solved ones first.

    With `in_their_order` the first so many instead, of each source in turn: not chosen by how they ended.
    """
    files = run_dir.eval_rollouts(0).parent.glob("eval_step_*.jsonl")
    steps = sorted(int(path.stem.removeprefix("eval_step_")) for path in files)
    if len(steps) < 2:
        return "Completions are compared once two evals have been written."
    first, last = (_first_samples(run_dir.eval_rollouts(step)) for step in (steps[0], steps[-1]))
    shared = sorted(ordinal for ordinal in last if ordinal in first)
    if in_their_order:
        shared = _sources_in_turn({ordinal: last[ordinal]["source"] for ordinal in shared})
    else:
        shared.sort(key=lambda ordinal: (bool(first[ordinal]["solved"]), not last[ordinal]["solved"], ordinal))
    blocks = []
    for ordinal in shared[: in_their_order or _SHOWN_COMPLETIONS]:
        before, after = first[ordinal], last[ordinal]
        result = str(after["answer"]).rpartition("####")[2]  # of GSM8K's form, else all of it
        blocks.append(
            f"{_shortened(_asked(after['prompt']))}   (answer: {_shortened(result)})\n"
            f"  step {steps[0]:>4} {_verdict(before)} {_shortened(before['completion'])}\n"
            f"  step {steps[-1]:>4} {_verdict(after)} {_shortened(after['completion'])}"
        )
    return "\n".join(blocks)


def _sources_in_turn(sources: Mapping[int, str]) -> list[int]:
    """Order ordinals so that the first of each source come first, then the second of each.

    >>> _sources_in_turn({0: "gcd", 1: "gcd", 2: "sums"})
    [0, 2, 1]
    """
    seen: Counter[str] = Counter()
    turns = {}
    for ordinal, source in sources.items():
        turns[ordinal] = seen[source]
        seen[source] += 1
    return sorted(turns, key=lambda ordinal: (turns[ordinal], ordinal))


def _first_samples(path: Path) -> dict[int, dict[str, Any]]:
    """Return the first completion of every prompt whose reward did not fail, by ordinal."""
    samples: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        if line["solved"] is not None:
            samples.setdefault(line["ordinal"], line)
    return samples


def _asked(prompt: str) -> str:
    """Return what the user says last in a prompt in ChatML (Qwen, SmolLM), else the whole prompt."""
    said = _USER_TURN.findall(prompt)
    return str(said[-1]) if said else prompt


def _verdict(sample: dict[str, Any]) -> str:
    return "right" if sample["solved"] else "wrong"


def _shortened(text: str) -> str:
    return one_line(text, _SHOWN_CHARACTERS) if text.strip() else ""
