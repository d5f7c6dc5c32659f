"""Dr. GRPO: GRPO without its two biases, towards long wrong answers and towards easy and hard prompts."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register(
    "dr_grpo",
    normalize_std=False,
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    denominator="constant",
    scales_advantage=True,
)
def dr_grpo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the Dr. GRPO loss per token `[C]` (arXiv:2503.20783).

    L = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),   r = exp(learner_logprobs - proximal_logprobs)

    A = r_i - mean(r), without the standard deviation, and every sequence's sum is divided by one constant, the
    longest completion (as in TRL; the authors' code has the same), whatever its own length.
    """
    return clipped_surrogate(inputs, settings, token_ratios(inputs))
