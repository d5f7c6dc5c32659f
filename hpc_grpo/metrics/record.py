"""The record of one step, which the driver gives to every sink."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

REWARD = "reward/mean"
PASS_AT_1 = "eval/pass@1"


@dataclass(frozen=True)
class StepRecord:
    """The metrics of one training step and its place in the run.

    `step` counts finished steps from 1; 0 is the record of the eval before the first step. `epoch` and
    `step_in_epoch` count from 1 too. `metrics` maps the field-standard names (`reward/mean`, `time/train_s`)
    to floats; a name without a value in this step is absent, never 0.
    `time_s` is seconds since the Unix epoch.
    """

    step: int
    total_steps: int
    metrics: Mapping[str, float]
    attempt: int = 1
    epoch: int = 1
    total_epochs: int = 1
    step_in_epoch: int = 1
    steps_per_epoch: int = 1
    time_s: float = field(default_factory=time.time)
