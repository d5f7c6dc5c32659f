"""Summarise a run in a few lines: what it has learned, how engines and learner differed, where the time went."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from hpc_grpo.metrics.record import PASS_AT_1, phase_seconds

Metrics = Mapping[int, Mapping[str, Any]]
"""The metrics of each step, as in metrics.jsonl."""


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
