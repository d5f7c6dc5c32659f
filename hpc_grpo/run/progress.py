"""A run's progress, written by its driver: state.json, a summary of the last finished step, and metrics.jsonl.

metrics.jsonl has a line forevery step and is append-only (metrics/sinks.py), so any command may read it.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpc_grpo.run.files import from_known, read_jsonl, read_record, when_there_is_space, write_record
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.readable import number_or_none

Phase = Literal["starting", "training", "stopped", "complete"]


@dataclass(frozen=True)
class RunState:
    """`reward`, `tokens_per_s` and `eta_s` are None before the first finished step. Times are Unix seconds.

    `step_p95_s`, `eval_p95_s` and `save_p95_s` are the 95th percentiles of a step (without eval and save), an eval and
    a checkpoint (driver/schedule.py). `longest_s` has the driver's longest time in each phase, over all attempts
    (run/pulse.py). `slow_node` describes a node that is notably slower than the others, "" for none.
    """

    step: int
    total_steps: int
    attempt: int
    phase: Phase
    reward: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    step_p95_s: float | None = None
    eval_p95_s: float | None = None
    save_p95_s: float | None = None
    longest_s: dict[str, float] = field(default_factory=dict)
    slow_node: str = ""
    heartbeat: float = field(default_factory=time.time)


def write_state(run_dir: RunDir, state: RunState) -> None:
    when_there_is_space(lambda: write_record(run_dir.state, asdict(state)), "state.json")


def read_state(run_dir: RunDir) -> RunState | None:
    """Return the last published state; None before the first one, and if it is damaged."""
    return read_record(run_dir.state, from_known(RunState))


def read_metrics(path: Path) -> dict[int, dict[str, Any]]:
    """Return the surviving line of every step, in ascending order; {} without a file.

    Values that are no finite numbers, such as null, read as NaN. An attempt's first line cancels that step and later
    steps of earlier attempts.
    """
    lines: dict[int, dict[str, Any]] = {}
    attempt = None
    for line in read_jsonl(path):
        step = line.get("step")
        if not (isinstance(step, int) and isinstance(line.get("attempt"), int)):
            continue  # a name that the disk changed
        if line["attempt"] != attempt:
            attempt = line["attempt"]
            while lines and next(reversed(lines)) >= step:
                lines.popitem()
        # Interned: of a hundred thousand lines each name is held once.
        numbers = {name: value if type(value) is float else number_or_none(value) for name, value in line.items()}
        lines[step] = {
            sys.intern(name): line[name] if number is not None and math.isfinite(number) else math.nan
            for name, number in numbers.items()
        }
    return {step: lines[step] for step in sorted(lines)}
