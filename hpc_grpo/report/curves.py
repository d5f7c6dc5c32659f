"""`hpc-grpo report RUN_DIR`: what a run has learned, from its files alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.console_lines import PASS_AT_1, REWARD
from hpc_grpo.report import terminal_plot
from hpc_grpo.report.terminal_plot import Curve
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics

_SHOWN_COMPLETIONS = 4
_SHOWN_CHARACTERS = 400


def report(run_dir: RunDir) -> Path:
    """Print the curves of a run and completions from before and after; returns the path of report.png.

    Raises ConfigError when the directory holds no metrics.
    """
    metrics = read_metrics(run_dir.metrics)
    curves = find_curves(metrics)
    if not curves:
        raise ConfigError(
            f"{run_dir.metrics} holds no {REWARD} or eval yet: has the run finished a step? "
            f"Give the run's folder, <runs root>/<run name>."
        )
    print(terminal_plot.plot(curves))
    for curve in curves:
        print(
            f"{curve.name}: {curve.values[0]:.3f} (step {curve.steps[0]}) -> {curve.values[-1]:.3f} "
            f"(step {curve.steps[-1]})"
        )
    picture = run_dir.path / "report.png"
    write_picture(curves, picture, run_dir.path.name)
    print(f"\n{before_and_after(run_dir)}\nPicture: {picture}")
    return picture


def find_curves(metrics: dict[int, dict[str, Any]]) -> list[Curve]:
    """The reward and every eval pass@k; of a run without either (SFT) the loss."""
    names = {name for line in metrics.values() for name in line}
    wanted = [name for name in (REWARD, PASS_AT_1) if name in names]
    wanted += sorted(name for name in names if name.startswith("eval/pass@") and name != PASS_AT_1)
    if not wanted and "loss/policy" in names:
        wanted = ["loss/policy"]
    return [curve for curve in (_curve(name, metrics) for name in wanted) if curve.steps]


def _curve(name: str, metrics: dict[int, dict[str, Any]]) -> Curve:
    points = [(step, line[name]) for step, line in metrics.items() if not math.isnan(line.get(name, math.nan))]
    return Curve(name, tuple(step for step, _ in points), tuple(value for _, value in points))


def write_picture(curves: list[Curve], path: Path, title: str) -> None:
    """The curves as a PNG file."""
    # Not pyplot: it would look for a display and keep the figure in a global list.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve in curves:
        marker = "o" if curve.name.startswith("eval/") else None
        axes.plot(curve.steps, curve.values, label=curve.name, marker=marker)
    axes.set_xlabel("step")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def before_and_after(run_dir: RunDir) -> str:
    """The same held-out prompts at the first and at the last eval, newly solved ones first."""
    steps = sorted(_eval_steps(run_dir))
    if len(steps) < 2:
        return "Completions are compared once two evals have been written."
    first, last = (_first_samples(run_dir.eval_rollouts(step)) for step in (steps[0], steps[-1]))
    shared = [ordinal for ordinal in last if ordinal in first]
    shared.sort(key=lambda ordinal: (bool(first[ordinal]["solved"]), not last[ordinal]["solved"], ordinal))
    blocks = []
    for ordinal in shared[:_SHOWN_COMPLETIONS]:
        before, after = first[ordinal], last[ordinal]
        blocks.append(
            f"{_shortened(after['prompt'])}   (answer: {_result(after['answer'])})\n"
            f"  step {steps[0]:>4} {_verdict(before)} {_shortened(before['completion'])}\n"
            f"  step {steps[-1]:>4} {_verdict(after)} {_shortened(after['completion'])}"
        )
    return "\n".join(blocks)


def _eval_steps(run_dir: RunDir) -> list[int]:
    folder, pattern = run_dir.eval_rollouts(0).parent, "eval_step_"
    return [int(path.stem.removeprefix(pattern)) for path in folder.glob(f"{pattern}*.jsonl")]


def _first_samples(path: Path) -> dict[int, dict[str, Any]]:
    """The first completion of every prompt whose reward did not fail, by ordinal."""
    samples: dict[int, dict[str, Any]] = {}
    for line in read_jsonl(path):
        if line["solved"] is not None:
            samples.setdefault(line["ordinal"], line)
    return samples


def _verdict(sample: dict[str, Any]) -> str:
    return "right" if sample["solved"] else "wrong"


def _result(answer: Any) -> str:
    """What follows GSM8K's `####`, else all of it."""
    return _shortened(str(answer).rpartition("####")[2])


def _shortened(text: str) -> str:
    """On one line, cut where it gets long."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[:_SHOWN_CHARACTERS] + "…"
