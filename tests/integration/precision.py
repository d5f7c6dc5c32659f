"""How far learner and engine are apart in bfloat16, by ZeRO stage, gradient checkpointing and `model.head_dtype`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import metrics_of, tiny_config

KL_BOUND = 1e-3
"""Nats a token, in every step."""


@dataclass(frozen=True)
class Precision:
    zero_stage: int
    gradient_checkpointing: bool
    head_dtype: str = "float32"

    def __str__(self) -> str:
        checkpointing = "checkpointed" if self.gradient_checkpointing else "kept"
        return f"zero-{self.zero_stage}-{checkpointing}-{self.head_dtype}"


@dataclass(frozen=True)
class PrecisionReport:
    """`mismatch/kl` over the steps, and differences of logprobs over all tokens, in nats."""

    steps: int
    mean_kl: float
    largest_kl: float
    mean_difference: float
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.steps:5} | {self.mean_kl:.2e} | {self.largest_kl:.2e} | {self.mean_difference:.2e} | "
            f"{self.largest_difference:.2e}"
        )


def bfloat16_config(workspace: Path, name: str, precision: Precision, steps: int, model: str = "tied") -> Path:
    train = {
        "total_steps": steps,
        "zero_stage": precision.zero_stage,
        "gradient_checkpointing": precision.gradient_checkpointing,
    }
    path = tiny_config(workspace, name, model, train=train)
    values = yaml.safe_load(path.read_text())
    values["model"] |= {"dtype": "bfloat16", "head_dtype": precision.head_dtype}
    path.write_text(yaml.safe_dump(values))
    return path


def measure(run_dir: RunDir) -> PrecisionReport:
    steps = list(metrics_of(run_dir).values())
    kl, mean, largest = (
        np.array([values[f"mismatch/{name}"] for values in steps])
        for name in ("kl", "logprob_abs_diff_mean", "logprob_abs_diff_max")
    )
    return PrecisionReport(len(steps), float(kl.mean()), float(kl.max()), float(mean.mean()), float(largest.max()))
