"""Held-out pass@1 of the demo's task after the demo's steps: full training beside LoRA of rank 1 and of rank 16.

`python benchmarks/lora_learning.py --folder FOLDER` after `tools/setup.sh cpu,demo`. LoRA has ten times the learning
rate of full training, and alpha 64. One run at a time, each seed with all variants before the next seed. `publish` is
two steps that publish the adapter alone. A run that is complete in FOLDER is read, not run again. `--model` is a folder
that is there instead of the package's model. Each result is appended to FOLDER/results.txt as soon as it is known.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from common import load_average, median, print_table
from learning_curves import Interval

from hpc_grpo.demo.smollm2 import write_smollm2
from hpc_grpo.metrics.record import PASS_AT_1
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics

LORA = {"train.lr": 2e-4, "lora.alpha": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "rank 1": {"lora.rank": 1, **LORA},
    "rank 16": {"lora.rank": 16, **LORA},
}
PUBLISHES: dict[str, dict[str, Any]] = {
    f"{name}, adapter": {**VARIANTS[name], "lora.publish": "adapter", "train.total_steps": 2}
    for name in ("rank 1", "rank 16")
}
HEADER = ("trained", "seeds", "pass@1 before", "pass@1 after", "step", "publish", "bytes of an export")


@click.command()
@click.option("--folder", default="runs/lora_learning", type=click.Path(path_type=Path), show_default=True)
@click.option("--model", type=click.Path(path_type=Path, exists=True), help="Default: made in FOLDER.")
@click.option("--seeds", default=5, type=click.IntRange(2, 5), show_default=True)
def main(folder: Path, model: Path | None, seeds: int) -> None:
    """Train every variant with every seed; print the means over seeds with 95% intervals (Student's t)."""
    folder = folder.resolve()
    if model is None and not (model := folder / "smollm2").is_dir():
        write_smollm2(model)
    found: dict[str, list[tuple[Any, ...]]] = {}
    jobs = [(name, seed) for seed in range(seeds) for name in VARIANTS]
    jobs[len(VARIANTS) : len(VARIANTS)] = [(name, 0) for name in PUBLISHES]
    for name, seed in jobs:
        found.setdefault(name, []).append(_result(_train(folder, model.resolve(), name, seed)))
        title = f"pass@1, 95% intervals over seeds; {load_average()}"
        print_table(title, HEADER, [_row(*each) for each in found.items()])


def _train(folder: Path, model: Path, name: str, seed: int) -> RunDir:
    run = RunDir(folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}")
    if not run.is_complete():
        settings = {"run.name": run.path.name, "run.root": folder, "run.seed": seed, "model.path": model}
        settings |= {"eval.every": 10, "train.max_tokens_per_microbatch": 512, **{**VARIANTS, **PUBLISHES}[name]}
        overrides = [f"{key}={value}" for key, value in settings.items()]
        subprocess.run([sys.executable, "-m", "hpc_grpo.cli", "train", "local/demo", *overrides], check=True)
        with (folder / "results.txt").open("a") as results:
            results.write(f"{name}\tseed {seed}\t{_result(run)}\t{load_average()}\n")
    return run


def _result(run: RunDir) -> tuple[float, float, float, float, int]:
    """Return pass@1 before and after, the median seconds of a step and of a publish, and an export's bytes."""
    metrics = read_metrics(run.metrics)
    trained = [line for step, line in metrics.items() if step]
    export = run.latest_export()
    assert export is not None, "a complete run has an export"
    times = (median([line[f"time/{name}_s"] for line in trained]) for name in ("step", "publish"))
    size = sum(file.stat().st_size for file in export.glob("*.safetensors"))
    return metrics[0][PASS_AT_1], metrics[max(metrics)].get(PASS_AT_1, float("nan")), *times, size  # type: ignore[return-value]


def _row(name: str, results: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    before, after, step, publish, size = zip(*results, strict=True)
    shares = [_interval(own) if name in VARIANTS else "" for own in (before, after)]
    return name, str(len(results)), *shares, f"{median(step):.1f} s", f"{1000 * median(publish):.0f} ms", f"{size[0]:,}"


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}"
    own = Interval.of(values)
    return f"{own.mean:.3f} ± {own.half_width:.3f}"


if __name__ == "__main__":
    main()
