"""Terms that losses share: ratios, the clipped surrogate, sums over sequences, and the KL to another policy.

All is written with methods of tensors: a login node asks losses for their papers' settings, and has no torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from hpc_grpo.config import LossConfig

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: far beyond any ratio that means something, far below where float32 overflows."""


def token_ratios(inputs: LossInputs) -> Tensor:
    """Return r = exp(learner_logprobs - proximal_logprobs) `[C]`, with gradient."""
    return bounded_exp(inputs.learner_logprobs - inputs.proximal_logprobs)


def sequence_ratios(inputs: LossInputs) -> Tensor:
    """Return s = exp(mean of the sequence's log r) for each token `[C]`, with gradient (GSPO, arXiv:2507.18071)."""
    return bounded_exp(sequence_mean(inputs.learner_logprobs - inputs.proximal_logprobs, inputs.sequence_ids))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), finite in float32: clip ranges bind long before the clamp does."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_sum(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give each token `[C]` the sum over its sequence."""
    # No sequence is empty, so C places are enough; asking for the largest id would stall a GPU.
    return values.new_zeros(len(values)).index_add(0, sequence_ids, values)[sequence_ids]


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Give each token `[C]` the mean over its sequence."""
    return sequence_sum(values, sequence_ids) / sequence_sum(values.new_ones(len(values)), sequence_ids)


def interpolated_proximal(inputs: LossInputs, versions: Tensor, proximal_version: int, version: int) -> Tensor:
    """Estimate the proximal logprobs `[C]` from those of the engine and of the learner, without gradient.

    log p = log e + a * (log l - log e),   a = (proximal_version - v) / (version - v) within [0, 1], or 0 without a step

    Log-linear in the version v that sampled the token (AReaL's `loglinear`, areal/trainer/ppo/actor.py): it saves the
    forward pass that computes them. `version` is the learner's now, `inputs.proximal_logprobs` is not read.
    """
    steps = version - versions
    share = ((proximal_version - versions) / steps.clamp(min=1.0)).clamp(0.0, 1.0) * (steps > 0.0)
    return inputs.engine_logprobs + share * (inputs.learner_logprobs.detach() - inputs.engine_logprobs)


def clipped_surrogate(inputs: LossInputs, settings: LossConfig, ratio: Tensor) -> LossOutput:
    """Return PPO's clipped surrogate per token `[C]` (arXiv:1707.06347) of ratios to the proximal policy.

    L = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    L = min(L, -dual_clip * A) where A < 0      (dual clip, arXiv:1912.09729), with `dual_clip`
    """
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    policy = -(ratio * inputs.advantages).minimum(ratio.clamp(low, high) * inputs.advantages)
    is_negative = inputs.advantages < 0
    is_clipped = ((ratio > high) & (inputs.advantages > 0)) | ((ratio < low) & is_negative)
    if settings.dual_clip is not None:
        policy = policy.minimum(-settings.dual_clip * inputs.advantages).where(is_negative, policy)
        is_clipped = is_clipped | ((ratio > settings.dual_clip) & is_negative)
    return LossOutput(policy, ratio_metrics(ratio, is_clipped))


def ratio_metrics(ratio: Tensor, is_clipped: Tensor) -> dict[str, Tensor]:
    """Name what every loss with a ratio tells per token `[C]`: the ratio, and where the clip takes the gradient."""
    return {"policy/ratio_mean": ratio.detach(), "policy/clip_fraction": is_clipped.to(ratio.dtype)}


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate KL(p || q) per token `[C]`, in nats, at tokens sampled from p.

    k3 = exp(d) - d - 1 with d = log q - log p   (Schulman, "Approximating KL divergence", 2020)

    It is never negative, unbiased in value, and has less variance than -d. `logprobs` are log p,
    `other_logprobs` log q, both `[C]`. Gradients flow through both.
    """
    difference = (other_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.expm1() - difference


def kl_estimate(estimator: str, logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate KL(p || q) per token `[C]`, in nats, by k1, k2 or k3 of Schulman's.

    k1 = log p - log q,   k2 = k1^2 / 2,   k3: `kl_k3`
    """
    if estimator == "k3":
        return kl_k3(logprobs, other_logprobs)
    difference = logprobs - other_logprobs
    return difference if estimator == "k1" else 0.5 * difference.square()


def importance_weights(proximal_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Weigh tokens `[C]` whose engine had other logprobs than the learner: other kernels, older weights.

    w = min(exp(proximal_logprobs - engine_logprobs), cap), without gradient

    Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"), in the place it has in decoupled PPO (Hilton et al., arXiv:2110.00641; AReaL,
    arXiv:2505.24298): it corrects from the behaviour policy (the engine) to the proximal policy (the learner at
    the start of the step), and the clipped ratio then measures the distance from the proximal policy alone.
    """
    # The cap is applied to the exponent, so that a huge difference cannot overflow before it is cut.
    return (proximal_logprobs - engine_logprobs).detach().clamp(max=math.log(cap)).exp()
