"""The objective of a run: a policy loss with correction, KL, entropy bonus and metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hpc_grpo.algorithms.losses import Denominator, KlSettings, LossSettings, Proximal
from hpc_grpo.algorithms.terms import LossInputs, LossOutput, kl_estimate, kl_k3, sequence_sum, token_ratios

if TYPE_CHECKING:
    from torch import Tensor

    from hpc_grpo.types import Minibatch


Term = Callable[[LossInputs], LossOutput]
Preparation = Callable[[LossInputs], Any]
"""`prepare` of a loss or correction: sees all tokens of an optimizer step, over all microbatches and ranks."""


@dataclass(frozen=True)
class TokenWeights:
    """Loss weights `of_tokens` `[C]` of a microbatch's tokens. `units` is the microbatch's part of the divisor."""

    of_tokens: Tensor
    units: Tensor


@dataclass(frozen=True)
class Objective:
    """The objective of an optimizer step: `loss` per token `[C]`, weighted, summed and divided by `denominator`.

    `LossInputs.of_minibatch` must hold the results of `preparations`, by name. `proximal` is `loss.proximal`.
    `is_still_without_advantage`: a sequence whose advantages are all 0 has no gradient from `loss`, and does not change
    the gradients of other sequences.
    """

    loss: Term
    denominator: Denominator = "tokens"
    preparations: Mapping[str, Preparation] = field(default_factory=dict)
    proximal: Proximal = "recomputed"
    is_still_without_advantage: bool = False

    def token_weights(self, longest: int, sequence_ids: Tensor, mask: Tensor) -> TokenWeights:
        """Return the weights of a microbatch's tokens for `loss.denominator`. Each choice's weight and units:

        tokens:     1, and the number of tokens
        sequences:  1 / tokens of the token's sequence, and the number of sequences
        constant:   1 / `longest`, and the number of sequences; a configured number replaces `longest`

        A sequence is never cut, so its weights depend on no other sequence. A token of `mask` 0.0 gets weight 0 and
        adds nothing to the units.
        """
        if self.denominator == "tokens":
            return TokenWeights(mask, mask.sum())
        share = mask / sequence_sum(mask.new_ones(len(mask)), sequence_ids)
        if self.denominator == "sequences":
            return TokenWeights(share, share.sum())
        constant = longest if self.denominator == "constant" else self.denominator
        return TokenWeights(mask / float(constant), share.sum())

    def divisor(self, minibatch: Minibatch[Any]) -> int:
        """Return the loss's divisor: the sum of `token_weights(...).units` over all microbatches of all ranks."""
        return minibatch.num_valid_tokens if self.denominator == "tokens" else minibatch.num_sequences


def policy_objective(settings: LossSettings, term: Term | None = None) -> Objective:
    """Return the objective of section `loss`. `term` replaces the loss's own term.

    Raises ConfigError if the user's function does not exist or does not take its args.
    """
    parts = (settings, settings.correction)
    for part in parts:
        part.check()
    return Objective(
        partial(_policy_loss, settings, term or settings.term),
        settings.denominator,
        {part.name: part.prepare for part in parts if part.compares_minibatch},
        settings.proximal,
        term is None and settings.is_still_without_advantage,
    )


def _policy_loss(settings: LossSettings, term: Term, inputs: LossInputs) -> LossOutput:
    """Return L = w * policy + kl.coef * KL - entropy_coef * entropy, per token `[C]`.

    With `kl.where` = reward there is no KL term: the KL is subtracted from the advantages (`reward_penalty`).
    """
    means = {}
    if settings.kl.where == "reward" and inputs.ref_logprobs is not None:
        penalty = reward_penalty(inputs, inputs.ref_logprobs, settings.kl)
        inputs = replace(inputs, advantages=inputs.advantages - penalty)
        means["kl/advantage_penalty"] = penalty
    output, applied = term(inputs), settings.correction.weigh(inputs)
    weights, is_masked = applied.weights, applied.weights == 0.0
    per_token = output.per_token * weights
    means |= output.means
    means["correction/weight_mean"] = weights
    means["correction/clipped_fraction"] = (applied.bounded & ~is_masked).to(weights.dtype)
    means["correction/masked_fraction"] = is_masked.to(weights.dtype)
    terms = {"loss/policy": per_token.detach()}
    if inputs.ref_logprobs is not None:
        means["kl/learner_ref"] = kl_k3(inputs.learner_logprobs, inputs.ref_logprobs).detach()
        if settings.kl.where == "loss":
            kl = settings.kl.coef * loss_kl(inputs, inputs.ref_logprobs, weights, settings.kl)
            terms["loss/kl"] = kl.detach()
            per_token = per_token + kl
    if settings.entropy_coef and inputs.entropy is not None:
        bonus = -settings.entropy_coef * inputs.entropy
        terms["loss/entropy"] = bonus.detach()
        per_token = per_token + bonus
    return LossOutput(per_token, means, output.maxima, output.terms | terms, {"correction/ess": weights})


def loss_kl(inputs: LossInputs, ref_logprobs: Tensor, weights: Tensor, settings: KlSettings) -> Tensor:
    """Estimate the KL to the reference per token `[C]`, with gradient.

    unbiased = w * r * k3. r is the ratio to the proximal policy, with gradient. w corrects from the engine to the
    proximal policy. Value and gradient are those of the learner's KL, whichever policy sampled (DeepSeek-V3.2,
    arXiv:2512.02556, eq. 7). On-policy the gradient is k2's.
    """
    if settings.estimator != "unbiased":
        return kl_estimate(settings.estimator, inputs.learner_logprobs, ref_logprobs)
    return weights * token_ratios(inputs) * kl_k3(inputs.learner_logprobs, ref_logprobs)


def reward_penalty(inputs: LossInputs, ref_logprobs: Tensor, settings: KlSettings) -> Tensor:
    """Return kl.coef times the KL of this token and all later tokens of its sequence `[C]`, without gradient.

    A_t = A - kl.coef * sum over s >= t of KL_s, KL_s = the estimate of KL(proximal || reference) at token s

    The KL is a part of each token's reward, not normalised with the group's rewards. A token's advantage includes the
    KL of later tokens (InstructGPT, arXiv:2203.02155; REINFORCE++, arXiv:2501.03262, eq. 5).
    """
    kl = kl_estimate(settings.estimator, inputs.proximal_logprobs, ref_logprobs).detach()
    # Sequences are complete and in order: subtract the earlier sequences and this sequence's earlier tokens.
    running = kl.double().cumsum(0)
    is_last = inputs.sequence_ids != inputs.sequence_ids.roll(-1)
    is_last[-1] = True
    at_end = sequence_sum(running * is_last, inputs.sequence_ids)
    return settings.coef * (at_end - running + kl).to(kl.dtype)
