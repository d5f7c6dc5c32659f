"""GRPO: the clipped surrogate on group advantages."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register("grpo", clip_low=0.2, clip_high=0.2, dual_clip=None, denominator="tokens", scales_advantage=True)
def grpo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the GRPO loss per token `[C]` (DeepSeekMath, arXiv:2402.03300).

    L = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)
    r = exp(learner_logprobs - proximal_logprobs)

    Deviations from the paper: clip_high may differ from clip_low (DAPO, arXiv:2503.14476); the sum over tokens is
    divided by the number of valid tokens of the whole optimizer step, not first by each completion's length
    (DAPO). `loss.denominator: sequences` is the paper's.
    """
    return clipped_surrogate(inputs, settings, token_ratios(inputs))
