"""The record of one step, which the driver gives to every sink, and an episode as text."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpc_grpo.run.pulse import ASKED_AGAIN

REWARD = "reward/mean"
PASS_AT_1 = "eval/pass@1"

_PHASES = dict.fromkeys(("inputs", "connect", "start", "resume", "weights"), "loading the model")
_PHASES |= {"generate_wait": "generate", ASKED_AGAIN: "generate again"}


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one training step and its place in the run.

    `step` and `epoch` count from 1; step 0 is the eval before the first step. `metrics` lacks a name
    that has no value in this step. `rollouts` are the lines of rollouts/step_N.jsonl. `time_s` is in unix seconds.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    attempt: int = 1
    epoch: int = 1
    total_epochs: int = 1
    rollouts: Sequence[Mapping[str, Any]] = ()
    time_s: float = field(default_factory=time.time)


def phase_name(work: str) -> str:
    """Return the name of a driver phase for users. `work` is its name in metrics and in the pulse."""
    return _PHASES.get(work, work)


def phase_seconds(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step's phases by `phase_name`, without the step's total and the remaining time.

    >>> phase_seconds({"time/step_s": 4.0, "time/train_s": 3.0, "time/eta_s": 99.0, "lr": 0.1})
    {'train': 3.0}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name.startswith("time/") and name not in ("time/step_s", "time/eta_s") and not math.isnan(value):
            phase = phase_name(name.removeprefix("time/").removesuffix("_s"))
            found[phase] = found.get(phase, 0.0) + value
    return found


def played(turns: Sequence[Mapping[str, Any]]) -> str:
    """Return an episode's turns, in the form of rollout files, as text for a terminal.

    >>> print(played([{"text": "5", "reward": 0}, {"observation": "No.", "text": "7", "reward": 1.0}]))
    [turn 1, reward 0] 5
    [environment] No.
    [turn 2, reward 1] 7
    """
    lines = []
    for number, turn in enumerate(turns, 1):
        lines += [f"[environment] {turn['observation']}"] if number > 1 else []
        lines.append(f"[turn {number}, reward {turn['reward']:g}] {turn['text'].strip()}")
    return "\n".join(lines)
