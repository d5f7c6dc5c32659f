"""GRPO as one would write it first: one sequence at a time, no packing, no chunks, no DeepSpeed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hpc_grpo.config import Config
from hpc_grpo.types import TrainSequence


def naive_training(config: Config, steps: list[list[list[TrainSequence]]]) -> tuple[dict[str, Any], list[float]]:
    """Train on `steps` (each of minibatches of sequences); the final weights and each step's mean gradient norm."""
    train = config.train
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": train.adamw["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.adamw["betas"], eps=train.adamw["eps"])
    grad_norms = []
    for minibatches in steps:
        with torch.no_grad():
            proximal = [[logprobs_of(model, s, config) for s in sequences] for sequences in minibatches]
        norms = []
        for sequences, anchors in zip(minibatches, proximal, strict=True):
            optimizer.zero_grad()
            total = sum(s.num_trained_tokens for s in sequences)
            losses = [naive_loss(model, reference, s, a, config) for s, a in zip(sequences, anchors, strict=True)]
            (torch.stack(losses).sum() / total).backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), train.max_grad_norm)))
            optimizer.step()
        grad_norms.append(float(np.mean(norms)))
    return {name: p.detach().numpy() for name, p in model.named_parameters()}, grad_norms


def logprobs_of(model: Any, sequence: TrainSequence, config: Config) -> torch.Tensor:
    tokens = torch.from_numpy(sequence.token_ids.astype(np.int64))
    logits = model(tokens.unsqueeze(0)).logits[0, :-1] / config.rollout.temperature
    return logits.log_softmax(-1).gather(-1, tokens[1:, None])[sequence.loss_mask[1:], 0]


def naive_loss(
    model: Any, reference: Any, sequence: TrainSequence, proximal: torch.Tensor, config: Config
) -> torch.Tensor:
    """The sum over the completion's tokens of -w min(rA, clip(r)A) + kl_coef k3."""
    logprobs = logprobs_of(model, sequence, config)
    with torch.no_grad():
        towards_reference = logprobs_of(reference, sequence, config) - logprobs
    engine = torch.from_numpy(sequence.engine_logprobs[sequence.loss_mask])
    weight = (proximal - engine).exp().clamp(max=config.loss.correction.args.cap)
    ratio = (logprobs - proximal).exp()
    clipped = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
    advantages = torch.from_numpy(sequence.advantages[sequence.loss_mask])
    surrogate = torch.min(ratio * advantages, clipped * advantages)
    # k3 with the gradient through logprobs: towards_reference is a number here, so it is put back as one.
    difference = towards_reference + logprobs.detach() - logprobs
    k3 = difference.exp() - difference - 1
    return (-weight * surrogate + config.loss.kl.coef * k3).sum()
