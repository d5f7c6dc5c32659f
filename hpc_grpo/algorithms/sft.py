"""Supervised fine-tuning: imitate demonstrations."""

from __future__ import annotations

from hpc_grpo.algorithms.base import Algorithm
from hpc_grpo.algorithms.objective import Objective
from hpc_grpo.algorithms.terms import LossInputs, LossOutput
from hpc_grpo.registry import ALGORITHMS
from hpc_grpo.types import Demonstration, Needs, TrainSequence


@ALGORITHMS.register("sft")
class Sft(Algorithm):
    """Trains on every token of the completions, each as much as any other."""

    @property
    def needs(self) -> Needs:
        return Needs(labels=True)

    @property
    def items_per_step(self) -> int:
        return self.config.sft.batch_size

    def objective(self) -> Objective:
        return Objective(negative_log_likelihood)


def negative_log_likelihood(inputs: LossInputs) -> LossOutput:
    """Return the loss per token `[C]` in nats, L = -A * learner_logprobs; a demonstration's advantage is 1."""
    per_token = -inputs.advantages * inputs.learner_logprobs
    return LossOutput(per_token, terms={"loss/policy": per_token.detach()})


def demonstration_sequence(demonstration: Demonstration) -> TrainSequence:
    """Train on every token of the completion, with advantage 1; no engine sampled them."""
    import numpy as np

    prompt_length = len(demonstration.prompt_token_ids)
    token_ids = np.asarray(demonstration.prompt_token_ids + demonstration.completion_token_ids, dtype=np.int32)
    loss_mask = np.arange(len(token_ids)) >= prompt_length
    zeros = np.zeros(len(token_ids), dtype=np.float32)
    return TrainSequence(demonstration.ordinal, 0, token_ids, loss_mask, loss_mask.astype(np.float32), zeros)
