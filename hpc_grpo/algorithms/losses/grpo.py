"""GRPO: the clipped surrogate on group advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import MAX_LOG_RATIO, importance_weights, kl_k3
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register("grpo")
def grpo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the GRPO loss per token `[C]` (DeepSeekMath, arXiv:2402.03300).

    L = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3
    r = exp(learner_logprobs - proximal_logprobs)
    w = min(exp(proximal_logprobs - engine_logprobs), importance_cap), or 1 with importance_correction: none
    k3 = the estimate of KL(learner || reference): `common.kl_k3`

    Deviations from the paper: clip_high may differ from clip_low (DAPO, arXiv:2503.14476); the sum over tokens
    is divided by the number of valid tokens of the whole optimizer step, not first by each completion's length
    (DAPO); w corrects for the engines' logprobs (decoupled PPO: `common.importance_weights`) and does not
    weigh the KL term, which is a penalty on the learner whoever sampled the token.
    """
    # The clamp keeps exp finite in float32; the clip range binds long before.
    log_ratio = (inputs.learner_logprobs - inputs.proximal_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    policy = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
    if settings.importance_correction == "truncated":
        policy = policy * importance_weights(inputs.proximal_logprobs, inputs.engine_logprobs, settings.importance_cap)
    means, maxima = _diagnostics(inputs, ratio.detach(), settings)
    means["loss/policy"] = policy.detach()
    if inputs.ref_logprobs is None:
        return LossOutput(policy, means, maxima)
    kl = kl_k3(inputs.learner_logprobs, inputs.ref_logprobs)
    means["kl/learner_ref"] = kl.detach()
    means["loss/kl"] = settings.kl_coef * kl.detach()
    return LossOutput(policy + settings.kl_coef * kl, means, maxima)


def _diagnostics(
    inputs: LossInputs, ratio: Tensor, settings: LossConfig
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Measure per token `[C]` how far the ratio moved, and how far engine and learner disagree.

    `mismatch/kl` estimates KL(engine || learner at the start of the step) at tokens the engine sampled.
    """
    with torch.no_grad():
        too_high = (ratio > 1.0 + settings.clip_high) & (inputs.advantages > 0)
        too_low = (ratio < 1.0 - settings.clip_low) & (inputs.advantages < 0)
        difference = (inputs.proximal_logprobs - inputs.engine_logprobs).abs()
        means = {
            "policy/ratio_mean": ratio,
            "policy/clip_fraction": (too_high | too_low).float(),
            "mismatch/logprob_abs_diff_mean": difference,
            "mismatch/kl": kl_k3(inputs.engine_logprobs, inputs.proximal_logprobs),
        }
        return means, {"mismatch/logprob_abs_diff_max": difference}
