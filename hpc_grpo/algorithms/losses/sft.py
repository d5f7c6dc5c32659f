"""Supervised fine-tuning: imitate the completion."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.interface import LossInputs, LossOutput
from hpc_grpo.config import LossConfig


def loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Per-token negative log-likelihood `[C]` in nats, L = -A * learner_logprobs; a demonstration's advantage is 1."""
    per_token = -inputs.advantages * inputs.learner_logprobs
    return LossOutput(per_token, {"loss/policy": per_token.detach()})
