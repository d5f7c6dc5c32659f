"""Held-out pass@1 of SmolLM2-135M-Instruct on three tasks that nobody tuned, before and after training.

`python benchmarks/untuned_tasks.py --folder FOLDER` after `tools/setup.sh cpu,demo`. The built-in reward and the
config's defaults, but for `--lr` and what ten minutes on two cores ask for: float32, one engine, half the prompts of a
step, short completions, small microbatches. A run that is complete in FOLDER is read, not run again. The CPU time of a
step is that of all its processes: wall time says little where others use the cores.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from common import load_average, median, print_table

from hpc_grpo.demo.smollm2 import write_smollm2
from hpc_grpo.metrics.evals import bounds_of
from hpc_grpo.metrics.record import PASS_AT_1
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics

TASKS: dict[str, dict[str, Any]] = {
    "gcd": {"min_value": 2, "max_value": 40},
    "letter_counting": {},
    "spell_backward": {"min_word_len": 3, "max_word_len": 4},
}
HEADER = ("task", "pass@1 before", "pass@1 after", "tokens before", "tokens after", "minutes", "a step", "its CPU time")
_TRAIN_ITEMS, _EVAL_ITEMS = 1000, 200
_OF_THE_MACHINE: dict[str, Any] = {
    "rollout": {"prompts_per_step": 8, "max_new_tokens": 32},
    "engine": {"engines_per_node": 1, "num_threads": 2, "kv_cache_gib": 0.5},
    "launch": {"object_store_gib": 0.25},
}


@click.command()
@click.option("--folder", default="runs/untuned_tasks", type=click.Path(path_type=Path), show_default=True)
@click.option("--steps", default=12, show_default=True)
@click.option("--lr", default=2e-5, show_default=True, help="The config's default is 1e-6.")
@click.option("--only", multiple=True, type=click.Choice([*TASKS]), help="These tasks; default: all three.")
def main(folder: Path, steps: int, lr: float, only: tuple[str, ...]) -> None:
    """Train on each task in turn, and print what each run has learned."""
    print(f"Machine: {load_average()}")
    model = folder.resolve() / "smollm2"
    if not model.is_dir():
        write_smollm2(model)
    rows = [row(task, completed(_config(model, task, steps, lr))) for task in only or TASKS]
    print_table(f"{steps} steps of 8 x 8 completions, lr {lr:g}", HEADER, rows)


def _config(model: Path, task: str, steps: int, lr: float) -> dict[str, Any]:
    source = {"path": f"reasoning_gym:{task}"}
    return {
        "run": {"name": f"{task}-{lr:g}-{steps}", "root": str(model.parent)},
        "model": {"path": str(model), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": source | {"args": TASKS[task] | {"size": _TRAIN_ITEMS}},
            "eval": source | {"args": TASKS[task] | {"size": _EVAL_ITEMS, "seed": 1}},
            "deduplicate": True,
        },
        "rewards": [{"name": "reasoning_gym"}],
        "train": {"total_steps": steps, "lr": lr, "num_threads": 2, "max_tokens_per_microbatch": 1024},
        "eval": {"every": steps, "reward": "reasoning_gym"},
        **_OF_THE_MACHINE,
    }


def completed(config: Mapping[str, Any]) -> RunDir:
    """Train until the run is complete, if it is not; return it."""
    run = RunDir(Path(config["run"]["root"]) / config["run"]["name"])
    if not run.is_complete():
        file = run.path.with_suffix(".yaml")
        file.write_text(yaml.safe_dump(dict(config)))
        command = [sys.executable, "-m", "hpc_grpo.cli", "train", str(file)]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise click.ClickException(f"it did not end well: {shlex.join(command)}")
    return run


def row(task: str, run: RunDir) -> tuple[str, ...]:
    metrics = read_metrics(run.metrics)
    before, after = metrics[0], metrics[max(metrics)]
    seconds = sum((attempt.ended_at or 0.0) - attempt.started_at for attempt in read_attempts(run))
    steps = {line["time/step_s"]: line for line in metrics.values() if "time/train_s" in line}
    cores = [s * v for s, line in steps.items() for name, v in line.items() if name.startswith("process/cpu_cores/")]
    return (
        task,
        *(_interval(line) for line in (before, after)),
        *(f"{line['eval/tokens_mean']:.1f}" for line in (before, after)),
        f"{seconds / 60:.1f}",
        f"{median([*steps]):.0f} s",
        f"{sum(cores) / len(steps):.0f} s",
    )


def _interval(line: Mapping[str, Any]) -> str:
    value, low, high = (line[key] for key in (PASS_AT_1, *bounds_of(PASS_AT_1)))
    return f"{value:.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
