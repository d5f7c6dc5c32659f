"""The objective of a run: a policy loss, with the correction, the KL and their metrics around it, each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hpc_grpo.algorithms.corrections.base import Correction, Weights
from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput, PolicyLoss
from hpc_grpo.algorithms.losses.common import kl_estimate, kl_k3, sequence_sum, token_ratios
from hpc_grpo.registry import CORRECTIONS, LOSSES

if TYPE_CHECKING:
    from torch import Tensor

    from hpc_grpo.config import LossConfig
    from hpc_grpo.types import Minibatch


Preparation = Callable[[LossInputs, "LossConfig"], Any]
"""Makes of all tokens of an optimizer step, over all microbatches and ranks, what a variant wants to know of them."""


@dataclass(frozen=True)
class Objective:
    """L = w * policy + kl_coef * KL - entropy_coef * entropy, per token `[C]`; a `PolicyLoss` itself.

    `preparations` are what the policy loss and the correction make of all tokens of an optimizer step, by their names:
    `LossInputs.of_minibatch` is to hold the results.
    """

    policy_loss: PolicyLoss
    correction: Correction
    preparations: Mapping[str, Preparation] = field(default_factory=dict)

    def __call__(self, inputs: LossInputs, settings: LossConfig) -> LossOutput:
        means = {}
        if settings.kl_in == "reward" and inputs.ref_logprobs is not None:
            penalty = reward_penalty(inputs, inputs.ref_logprobs, settings)
            inputs = replace(inputs, advantages=inputs.advantages - penalty)
            means["kl/advantage_penalty"] = penalty
        output = self.policy_loss(inputs, settings)
        applied = self.correction(inputs, settings)
        per_token = output.per_token * applied.weights
        means |= output.means | _mismatch(inputs) | _of_correction(applied)
        terms = {"loss/policy": per_token.detach()}
        if inputs.ref_logprobs is not None:
            means["kl/learner_ref"] = kl_k3(inputs.learner_logprobs, inputs.ref_logprobs).detach()
            if settings.kl_in == "loss":
                kl = settings.kl_coef * loss_kl(inputs, inputs.ref_logprobs, applied.weights, settings)
                terms["loss/kl"] = kl.detach()
                per_token = per_token + kl
        if settings.entropy_coef and inputs.entropy is not None:
            bonus = -settings.entropy_coef * inputs.entropy
            terms["loss/entropy"] = bonus.detach()
            per_token = per_token + bonus
        difference = means["mismatch/logprob_abs_diff_mean"]
        maxima = output.maxima | {"mismatch/logprob_abs_diff_max": difference}
        return LossOutput(per_token, means, maxima, output.terms | terms, {"correction/ess": applied.weights})

    def is_still_without(self, settings: LossConfig) -> bool:
        """Tell whether a sequence whose advantages are all 0 has no gradient: if the loss is the one that is named."""
        return settings.is_still_without_advantage and self.policy_loss is LOSSES.find(settings.name)


def find_objective(settings: LossConfig) -> Objective:
    """Import the loss and the correction that the config names. Raises ConfigError where there are none."""
    chosen = {settings.name: LOSSES, settings.importance_correction: CORRECTIONS}
    papers = {name: registry.paper_of(name) or {} for name, registry in chosen.items()}
    preparations = {name: paper["prepare"] for name, paper in papers.items() if "prepare" in paper}
    return Objective(LOSSES.find(settings.name), CORRECTIONS.find(settings.importance_correction), preparations)


def loss_kl(inputs: LossInputs, ref_logprobs: Tensor, weights: Tensor, settings: LossConfig) -> Tensor:
    """Estimate the KL to the reference per token `[C]`, with gradient.

    unbiased = w * r * k3, r the ratio to the proximal policy with its gradient, w the correction from there to the
    engine: value and gradient are then those of the learner's own KL, whoever sampled (DeepSeek-V3.2,
    arXiv:2512.02556, eq. 7). On-policy its gradient is k2's.
    """
    if settings.kl_estimator != "unbiased":
        return kl_estimate(settings.kl_estimator, inputs.learner_logprobs, ref_logprobs)
    return weights * token_ratios(inputs) * kl_k3(inputs.learner_logprobs, ref_logprobs)


def reward_penalty(inputs: LossInputs, ref_logprobs: Tensor, settings: LossConfig) -> Tensor:
    """Return kl_coef times the KL of this token and all later ones of its sequence `[C]`, without gradient.

    A_t = A - kl_coef * sum over s >= t of KL_s, KL_s = the estimate of KL(proximal || reference) at token s

    The KL as a part of the reward of each token, of which a token has the credit for what comes after it
    (InstructGPT, arXiv:2203.02155; REINFORCE++, arXiv:2501.03262, eq. 5), after the normalisation of the group.
    """
    kl = kl_estimate(settings.kl_estimator, inputs.proximal_logprobs, ref_logprobs).detach()
    # Sequences are whole and in order: those before this one, and this one's earlier tokens, are taken off.
    running = kl.double().cumsum(0)
    is_last = inputs.sequence_ids != inputs.sequence_ids.roll(-1)
    is_last[-1] = True
    at_end = sequence_sum(running * is_last, inputs.sequence_ids)
    return settings.kl_coef * (at_end - running + kl).to(kl.dtype)


@dataclass(frozen=True)
class TokenWeights:
    """`of_tokens` `[C]` weigh the tokens of a microbatch in the loss; `units` is what it adds to the divisor."""

    of_tokens: Tensor
    units: Tensor


def token_weights(settings: LossConfig, longest: int, sequence_ids: Tensor, mask: Tensor) -> TokenWeights:
    """Weigh the tokens of a microbatch as `loss.denominator` says; each weight, and what is counted:

    tokens:     1, and the number of tokens
    sequences:  1 / tokens of the token's sequence, and the number of sequences
    constant:   1 / denominator_tokens (or `longest`), and the number of sequences

    A sequence is never cut, so the weights depend on nothing but the sequence; the divisor is over all ranks and
    microbatches (`Minibatch`). A token of `mask` 0.0 has no weight and does not count.
    """
    if settings.denominator == "tokens":
        return TokenWeights(mask, mask.sum())
    share = mask / sequence_sum(mask.new_ones(len(mask)), sequence_ids)
    if settings.denominator == "sequences":
        return TokenWeights(share, share.sum())
    return TokenWeights(mask / float(settings.denominator_tokens or longest), share.sum())


def divisor(settings: LossConfig, minibatch: Minibatch) -> int:
    """Return what divides the loss: what `token_weights` adds up to over all microbatches of all ranks."""
    return minibatch.num_valid_tokens if settings.denominator == "tokens" else minibatch.num_sequences


def _mismatch(inputs: LossInputs) -> dict[str, Tensor]:
    """Measure per token `[C]` how far engine and learner disagree.

    `mismatch/kl` estimates KL(engine || learner at the start of the step) at tokens the engine sampled.
    """
    proximal, engine = inputs.proximal_logprobs.detach(), inputs.engine_logprobs
    return {"mismatch/logprob_abs_diff_mean": (proximal - engine).abs(), "mismatch/kl": kl_k3(engine, proximal)}


def _of_correction(applied: Weights) -> dict[str, Tensor]:
    weights, is_masked = applied.weights, applied.weights == 0.0
    return {
        "correction/weight_mean": weights,
        "correction/clipped_fraction": (applied.bounded & ~is_masked).to(weights.dtype),
        "correction/masked_fraction": is_masked.to(weights.dtype),
    }
