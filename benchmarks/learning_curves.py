"""Held-out pass@1 of the losses, and of the corrections where engines and learner disagree, over several seeds.

`python benchmarks/learning_curves.py --folder FOLDER`: every run starts from the same warm start (SFT of the demo's
600k model) and has the same steps, prompts and optimizer. It takes four optimizer steps a step at twice the demo's
learning rate, where ratios leave 1 and losses begin to differ: at four times the demo's, grpo diverges.
The mismatch is one that users have: engines in bfloat16, the learner in float32, rollouts up to 8 optimizer steps old.
A run that is complete in FOLDER is read, not run again. Prints tables and writes FOLDER/learning_curves.png.
"""

from __future__ import annotations

import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from common import load_average, print_table

from hpc_grpo.demo.make import main as make_demo
from hpc_grpo.metrics.record import PASS_AT_1
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics

_LAGGING = {"rollout.max_policy_lag": 4}
_MISMATCH = {"engine.dtype": "bfloat16", "rollout.max_policy_lag": 8}
_PPO = {"task.name": "ppo", "task.args.critic_lr": 1e-3, "task.args.gae_lambda": 1.0}
LOSSES: dict[str, Mapping[str, Any]] = {
    **{name: {"loss.name": name} for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "decoupled_ppo")},
    "ppo": _PPO,
    "grpo, lag 4": {"loss.name": "grpo", **_LAGGING},
    "decoupled_ppo, lag 4": {"loss.name": "decoupled_ppo", **_LAGGING},
}
CORRECTIONS: dict[str, Mapping[str, Any]] = {
    name: {"loss.correction": name, **_MISMATCH}
    for name in ("none", "truncated", "sequence", "icepop", "geometric", "m2po")
}
FIGURES = {"Losses, engines and learner alike": LOSSES, "Corrections, bfloat16 engines, lag 8": CORRECTIONS}
_STUDENT_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> the 0.975 quantile of Student's t with one degree of freedom less."""


@dataclass(frozen=True)
class Interval:
    """Holds a mean over seeds and the half width of its 95 % confidence interval (Student's t)."""

    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        scale = _STUDENT_T[len(values)] / len(values) ** 0.5
        return cls(statistics.fmean(values), scale * statistics.stdev(values))


@dataclass(frozen=True)
class Budget:
    folder: Path
    num_seeds: int
    num_steps: int


@click.command()
@click.option("--folder", default="runs/learning_curves", type=click.Path(path_type=Path), show_default=True)
@click.option("--seeds", default=3, type=click.IntRange(2, 5), show_default=True)
@click.option("--steps", default=30, type=click.IntRange(10), show_default=True)
@click.option("--only", multiple=True, help="Run only these names; all that are complete are shown.")
def main(folder: Path, seeds: int, steps: int, only: tuple[str, ...]) -> None:
    """Train every variant with every seed; print and draw how well each does on held-out problems."""
    print(f"Machine: {load_average()}")
    budget = Budget(folder.resolve(), seeds, steps)
    warm_start = _warm_start(budget.folder)
    curves: dict[str, dict[str, dict[int, Interval]]] = {}
    for title, variants in FIGURES.items():
        found = {
            name: _curve_of([_train(budget, warm_start, name, overrides, seed) for seed in range(seeds)])
            for name, overrides in variants.items()
            if not only or name in only
        }
        if found:
            curves[title] = found
            print_table(f"{title}: held-out pass@1, {seeds} seeds", _header(found), _rows(found))
    picture = budget.folder / "learning_curves.png"
    _draw(curves, picture)
    print(f"\nPicture: {picture}")


def _warm_start(folder: Path) -> Path:
    """Return the model that all runs start from; made once."""
    data, run_dir = folder / "demo", RunDir(folder / "runs" / "warm-start")
    if not run_dir.is_complete():
        make_demo([str(data), "--seed", "0"], standalone_mode=False)
        settings = {"model.path": data / "model", "data.train.path": data / "sft.jsonl"}
        _run("local/tiny_sft", run_dir, settings)
    export = run_dir.latest_export()
    assert export is not None, "a complete run has an export"
    return export


def _train(
    budget: Budget, warm_start: Path, name: str, overrides: Mapping[str, Any], seed: int
) -> dict[int, dict[str, Any]]:
    """Return the metrics of one run, by step."""
    plain_name = name.replace(", ", "-").replace(" ", "-")
    group = "mismatch-" if "engine.dtype" in overrides else ""
    run_dir = RunDir(budget.folder / "runs" / f"{group}{plain_name}-seed{seed}-steps{budget.num_steps}")
    if not run_dir.is_complete():
        data = budget.folder / "demo"
        settings = {
            "model.path": warm_start,
            "data.train.path": data / "train.jsonl",
            "data.eval.path": data / "eval.jsonl",
            "run.seed": seed,
            "train.total_steps": budget.num_steps,
            "train.num_minibatches": 4,
            "train.lr": 5e-4,
            "eval.every": budget.num_steps // 6,
            "eval.num_samples": 4,
            "checkpoint.every": "null",
            "rollout.logged_fraction": 0,
        }
        _run("local/tiny_grpo", run_dir, {**settings, **overrides})
    return read_metrics(run_dir.metrics)


def _run(config: str, run_dir: RunDir, settings: Mapping[str, Any]) -> None:
    """Train one run to its end. Raises RuntimeError with the end of its output where it failed."""
    where = {"run.name": run_dir.path.name, "run.root": run_dir.path.parent}
    overrides = [f"{key}={value}" for key, value in {**where, **settings}.items()]
    command = [sys.executable, "-m", "hpc_grpo.cli", "train", config, *overrides]
    print(f"+ {shlex.join(command[2:])}", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not run_dir.is_complete():
        raise RuntimeError(f"{run_dir.path.name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def _curve_of(runs: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[int, Interval]:
    """Return pass@1 over the seeds at every step that was evaluated."""
    steps = [step for step, line in runs[0].items() if PASS_AT_1 in line]
    return {step: Interval.of([run[step][PASS_AT_1] for run in runs]) for step in steps}


def _header(curves: Mapping[str, Mapping[int, Interval]]) -> list[str]:
    return ["variant", *(f"step {step}" for step in next(iter(curves.values())))]


def _rows(curves: Mapping[str, Mapping[int, Interval]]) -> list[list[str]]:
    return [
        [name, *(f"{point.mean:.3f} ± {point.half_width:.3f}" for point in curve.values())]
        for name, curve in curves.items()
    ]


def _draw(curves: Mapping[str, Mapping[str, Mapping[int, Interval]]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7 * len(curves), 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, variants) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for name, curve in variants.items():
            means = [point.mean for point in curve.values()]
            (line,) = place.plot(list(curve), means, marker="o", markersize=3, label=name)
            low, high = zip(
                *((point.mean - point.half_width, point.mean + point.half_width) for point in curve.values()),
                strict=True,
            )
            place.fill_between(list(curve), low, high, color=line.get_color(), alpha=0.1)
        place.set(title=title, xlabel="step", ylabel="held-out pass@1", ylim=(0, 1))
        place.grid(alpha=0.3)
        place.legend(fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    main()
