"""Run the whole demo, from nothing to a curve: `python -m hpc_grpo.demo.run`.

Makes a small model and its task, warm-starts it by SFT until it is right sometimes, then trains it with GRPO.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from hpc_grpo.demo.make import main as make_demo
from hpc_grpo.metrics.record import PASS_AT_1
from hpc_grpo.report.curves import print_report
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics

Seconds = dict[str, float]


@click.command()
@click.option("--folder", default="demo", type=click.Path(path_type=Path), show_default=True, help="Made afresh.")
@click.option("--seed", default=0, show_default=True, help="Of the task, the model and both runs.")
def main(folder: Path, seed: int) -> None:
    """Train the demo model in FOLDER and show how it got better."""
    shutil.rmtree(folder, ignore_errors=True)
    seconds: Seconds = {}
    with _timed(seconds, "make model and data"):
        make_demo([str(folder), "--seed", str(seed)], standalone_mode=False)
    with _timed(seconds, "warm start (SFT)"):
        sft = _train("demo_sft", folder, seed, model=folder / "model")
    warm_start = sft.latest_export()
    assert warm_start is not None, "a complete run has an export"
    with _timed(seconds, "GRPO"):
        grpo = _train("demo_grpo", folder, seed, model=warm_start)
    with _timed(seconds, "report"):
        print_report(grpo)
    click.echo("\nWall time by phase:")
    for phase, value in {**seconds, "total": sum(seconds.values())}.items():
        click.echo(f"  {phase:<22}{value:7.1f} s")
    _show_gain(grpo, seed)


def _train(config: str, folder: Path, seed: int, model: Path) -> RunDir:
    """Run `hpc-grpo train` until the run is complete; end this process with its exit code otherwise."""
    name = config.replace("_", "-")
    settings = {"run.name": name, "run.root": folder / "runs", "run.seed": seed, "model.path": model}
    settings |= {"data.train.path": folder / ("sft.jsonl" if config == "demo_sft" else "train.jsonl")}
    if config == "demo_grpo":
        settings["data.eval.path"] = folder / "eval.jsonl"
    overrides = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "hpc_grpo.cli", "train", f"local/{config}", *overrides]
    finished = subprocess.run(command, check=False)
    run_dir = RunDir(folder / "runs" / name)
    if finished.returncode or not run_dir.is_complete():
        sys.exit(finished.returncode or 1)
    return run_dir


@contextmanager
def _timed(seconds: Seconds, phase: str) -> Iterator[None]:
    click.echo(f"\n== {phase} ==")
    begun = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - begun


def _show_gain(run_dir: RunDir, seed: int) -> None:
    curve = {step: line[PASS_AT_1] for step, line in read_metrics(run_dir.metrics).items() if PASS_AT_1 in line}
    before, after = curve[min(curve)], curve[max(curve)]
    click.echo(
        f"\nCOMPLETE: seed {seed}, held-out pass@1 {before:.3f} after the warm start, {after:.3f} after GRPO "
        f"({100 * (after - before):+.1f} points)"
    )


if __name__ == "__main__":
    main()
