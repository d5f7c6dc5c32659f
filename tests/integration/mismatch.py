"""How far the engines' logprobs are from the learner's, over all updates of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import exported_weights, metrics_of

TOLERANCE = 1e-4


@dataclass(frozen=True)
class MismatchReport:
    """Differences in nats over all tokens of all steps; `moved` is the largest change of any weight.

    `policy_drift` is what an engine that never got an update would be off by: the mean absolute difference of the
    first and the last policy's logprobs on one text.
    """

    steps: int
    largest: float
    mean: float
    moved: float
    policy_drift: float

    def __str__(self) -> str:
        return (
            f"{self.steps} steps: max {self.largest:.2e}, mean {self.mean:.2e} nats; "
            f"weights moved by up to {self.moved:.3f}, the policy by {self.policy_drift:.2f} nats a token"
        )


def measure(run_dir: RunDir, model: Path) -> MismatchReport:
    steps = list(metrics_of(run_dir).values())
    before, after = _weights(model), exported_weights(run_dir)
    export = run_dir.latest_export()
    assert export is not None
    return MismatchReport(
        steps=len(steps),
        largest=max(values["mismatch/logprob_abs_diff_max"] for values in steps),
        mean=float(np.mean([values["mismatch/logprob_abs_diff_mean"] for values in steps])),
        moved=max(float(np.abs(after[name] - before[name]).max()) for name in before),
        policy_drift=float(np.abs(_logprobs(model) - _logprobs(export)).mean()),
    )


def _weights(model: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return load_file(model / "model.safetensors")


def _logprobs(model: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(model)("What is 37+48?\nMonday 85", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).numpy()
