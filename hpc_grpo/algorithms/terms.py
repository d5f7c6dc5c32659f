"""Inputs and outputs of losses and corrections, and the terms that they share.

Uses only methods of tensors and imports no torch: a login node without torch reads the losses' settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: far above any meaningful ratio, far below float32's overflow."""


@dataclass(frozen=True)
class LossInputs:
    """The trained tokens of a microbatch. Every tensor is `[C]` and float32, except `sequence_ids`, which is int64.

    Only `learner_logprobs` carries a gradient, and `entropy` if `loss.entropy_coef` is set. `loss.proximal` chooses the
    source of `proximal_logprobs`; by default they are the learner's at the start of the step. `ref_logprobs` is None
    without a reference, `teacher_logprobs` None without a teacher.
    `sequence_ids` numbers the sequences of the microbatch from 0, in order. A sequence is never cut, so a loss may sum
    or average over it. `draws` are uniform in [0, 1), to choose tokens at random. A token's draw does not depend on
    packing or ranks. `of_minibatch` maps the name of a loss or correction to the result of its `prepare`, which saw all
    tokens of the optimizer step, over all microbatches and ranks.
    """

    learner_logprobs: Tensor
    proximal_logprobs: Tensor
    engine_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    sequence_ids: Tensor
    entropy: Tensor | None = None
    draws: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    of_minibatch: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """The output of a loss. `per_token` `[C]` is summed over all tokens and divided by `loss.denominator`.

    The other fields hold per-token metrics `[C]` without gradient, by name. `terms` are parts of the loss, reduced like
    the loss. `means` and `maxima` are reduced over valid tokens, `weights` to their effective sample size.
    """

    per_token: Tensor
    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    terms: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def token_ratios(inputs: LossInputs) -> Tensor:
    """Return r = exp(learner_logprobs - proximal_logprobs) `[C]`, with gradient."""
    return bounded_exp(inputs.learner_logprobs - inputs.proximal_logprobs)


def sequence_ratios(inputs: LossInputs) -> Tensor:
    """Return s = exp(mean of the sequence's log r) for each token `[C]`, with gradient (GSPO, arXiv:2507.18071)."""
    return bounded_exp(sequence_mean(inputs.learner_logprobs - inputs.proximal_logprobs, inputs.sequence_ids))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), clamped to stay finite in float32. A clip range acts long before the clamp."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return for each token `[C]` the sum over its sequence."""
    # No sequence is empty, so C entries are enough. Reading the largest id would stall a GPU.
    return values.new_zeros(len(values)).index_add(0, sequence_ids, values)[sequence_ids]


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    return sequence_sum(values, sequence_ids) / sequence_sum(values.new_ones(len(values)), sequence_ids)


def interpolated_proximal(inputs: LossInputs, versions: Tensor, proximal_version: int, version: int) -> Tensor:
    """Estimate the proximal logprobs `[C]` from those of the engine and of the learner, without gradient.

    log p = log e + a * (log l - log e),   a = (proximal_version - v) / (version - v) within [0, 1], or 0 without a step

    v is the version that sampled the token (AReaL's `loglinear`, areal/trainer/ppo/actor.py), `version` the learner's
    current version. Interpolation saves a forward pass. `inputs.proximal_logprobs` is not read.
    """
    steps = version - versions
    share = ((proximal_version - versions) / steps.clamp(min=1.0)).clamp(0.0, 1.0) * (steps > 0.0)
    return inputs.engine_logprobs + share * (inputs.learner_logprobs.detach() - inputs.engine_logprobs)


def ratio_metrics(ratio: Tensor, is_clipped: Tensor) -> dict[str, Tensor]:
    """Return the per-token metrics `[C]` of a loss with a ratio: the ratio, and where the clip stops the gradient."""
    return {"policy/ratio_mean": ratio.detach(), "policy/clip_fraction": is_clipped.to(ratio.dtype)}


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate KL(p || q) per token `[C]`, in nats, at tokens sampled from p, with gradient through both.

    k3 = exp(d) - d - 1 with d = log q - log p   (Schulman, "Approximating KL divergence", 2020)

    k3 is never negative, is unbiased in value, and has less variance than -d. `other_logprobs` are log q.
    """
    difference = (other_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.expm1() - difference


def kl_estimate(estimator: str, logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate the KL by `estimator`: k3 (`kl_k3`), k1 = log p - log q, or k2 = k1^2 / 2."""
    if estimator == "k3":
        return kl_k3(logprobs, other_logprobs)
    difference = logprobs - other_logprobs
    return difference if estimator == "k1" else 0.5 * difference.square()
