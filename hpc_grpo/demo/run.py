"""Run the complete demo, from a model to what it has learned: `hpc-grpo demo`."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.metrics.record import PASS_AT_1, phase_seconds
from hpc_grpo.report.terminal import print_report
from hpc_grpo.run.lock import refuse_if_held
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from hpc_grpo.system.commands import run_in_foreground
from hpc_grpo.system.say import say

Seconds = dict[str, float]
Metrics = Mapping[int, Mapping[str, Any]]
"""The metrics of each step, as in metrics.jsonl."""

_SHOWN_PROMPTS = 10


class DemoFailedError(HpcGrpoError):
    """A training of the demo did not complete. The training has printed why; `exit_code` is its exit code."""

    def __init__(self, run: RunDir, exit_code: int) -> None:
        super().__init__(f"The training ended before it was complete; see above, and: hpc-grpo status --why {run.path}")
        self.exit_code = exit_code


def run_smollm2(folder: Path, config: str, seed: int, overrides: Sequence[str] = ()) -> None:
    """Train SmolLM2-135M-Instruct by GRPO only, with `configs/local/CONFIG.yaml`, and show the result.

    `overrides` are KEY=VALUE. Raises ConfigError without the model's package.
    """
    from hpc_grpo.demo.smollm2 import write_smollm2

    seconds: Seconds = {}
    with _timed(seconds, "model"):
        write_smollm2(folder / "smollm2")
        say(f"{folder / 'smollm2'}: SmolLM2-135M-Instruct in float32")
    with _timed(seconds, "GRPO"):
        run = _train(config, folder, {"run.seed": seed, "model.path": folder / "smollm2"}, overrides)
    _show(run, seed, seconds)


def run_tiny(folder: Path, seed: int, overrides: Sequence[str] = ()) -> None:
    """Make a random model and its task, warm-start it by SFT until it is sometimes right, then train it.

    `overrides` are KEY=VALUE for GRPO.
    """
    from hpc_grpo.demo.make import main as make

    seconds: Seconds = {}
    with _timed(seconds, "model and data"):
        make([str(folder), "--seed", str(seed)], standalone_mode=False)
    with _timed(seconds, "warm start (SFT)"):
        data = {"data.train.path": folder / "sft.jsonl"}
        sft = _train("tiny_sft", folder, {"run.seed": seed, "model.path": folder / "model", **data})
    warm_start = sft.latest_export()
    assert warm_start is not None, "a complete run has an export"
    with _timed(seconds, "GRPO"):
        data = {"data.train.path": folder / "train.jsonl", "data.eval.path": folder / "eval.jsonl"}
        run = _train("tiny_grpo", folder, {"run.seed": seed, "model.path": warm_start, **data}, overrides)
    _show(run, seed, seconds)


def _train(config: str, folder: Path, settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunDir:
    """Delete the earlier run and run `hpc-grpo train`. Raises DemoFailedError if the new run does not complete."""
    name = config.replace("_", "-")
    run = RunDir(folder / "runs" / name)
    refuse_if_held(run)
    shutil.rmtree(run.path, ignore_errors=True)
    ours = [f"{key}={value}" for key, value in {"run.root": folder / "runs", "run.name": name, **settings}.items()]
    command = [sys.executable, "-m", "hpc_grpo.cli", "train", f"local/{config}", *ours, *overrides]
    exit_code = run_in_foreground(command)
    if exit_code or not run.is_complete():
        raise DemoFailedError(run, exit_code or 1)
    return run


@contextmanager
def _timed(seconds: Seconds, phase: str) -> Iterator[None]:
    say(f"\n== {phase} ==")
    begun = time.monotonic()
    yield
    seconds[phase] = time.monotonic() - begun


def _show(run: RunDir, seed: int, seconds: Seconds) -> None:
    with _timed(seconds, "report"):
        print_report(run, in_their_order=_SHOWN_PROMPTS)
    metrics = read_metrics(run.metrics)
    say("\nWall time by phase:")
    for phase, value in {**seconds, "total": sum(seconds.values())}.items():
        say(f"  {phase:<24}{value:7.1f} s")
        if phase == "GRPO":
            for part, part_s in phases(metrics, value).items():
                say(f"    {part:<22}{part_s:7.1f} s")
    say(f"\n{largest_mismatch(metrics)}\n")
    for line in gains(metrics):
        say(f"Seed {seed}, held out: {line}")
    say("\nNext:")
    commands = next_commands(run.path, max(metrics))
    width = max(len(command) for command, _ in commands)
    for command, what in commands:
        say(f"  {command:<{width}}  # {what}")


def gains(metrics: Metrics) -> list[str]:
    """Compare pass@1 of the first and the last eval: over all tasks and, if there are several, for each."""
    by_task = {name for line in metrics.values() for name in line if name.startswith(f"{PASS_AT_1}/")}
    lines = []
    for name in [PASS_AT_1, *sorted(by_task)]:
        values = [line[name] for line in metrics.values() if not math.isnan(line.get(name, math.nan))]
        if values:
            before, after = values[0], values[-1]
            label = name.removeprefix("eval/")
            lines.append(f"{label} {before:.3f} before, {after:.3f} after ({100 * (after - before):+.1f} points)")
    return lines


def largest_mismatch(metrics: Metrics) -> str:
    """Return the largest difference between the logprobs of engines and learner in any step."""
    diff, kl = (
        max(line.get(f"mismatch/{name}", 0.0) for line in metrics.values()) for name in ("logprob_abs_diff_max", "kl")
    )
    return f"Engine against learner, the largest in any step: {diff:.1e} nats a token, KL {kl:.1e}"


def phases(metrics: Metrics, wall_s: float) -> dict[str, float]:
    """Divide a run's wall time into the phases of its steps, and the rest: Ray's start and the end."""
    steps = [phase_seconds(line) for line in metrics.values()]
    parts = {phase: sum(step.get(phase, 0.0) for step in steps) for phase in dict.fromkeys(chain(*steps))}
    return {"Ray, and the end": wall_s - sum(parts.values()), **parts}


def next_commands(run: Path, last_step: int) -> list[tuple[str, str]]:
    """List the next commands, each with its effect."""
    return [
        (f"hpc-grpo status --root {run.parent}", "the state of its runs"),
        (f"hpc-grpo status --why {run}", "what became of every attempt"),
        (f"hpc-grpo report {run}", "curves and completions again"),
        (f'hpc-grpo model sample {run} "What is 7 * 8?" --base --step {last_step}', "a question, before and after"),
        (f"hpc-grpo model eval {run} --num 8", "held-out pass@1, measured more closely"),
        (f"hpc-grpo config {run / 'config.yaml'}", "every setting, and what it means"),
    ]
