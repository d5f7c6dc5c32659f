"""CISPO: clips the weight of a token, and keeps the gradient of all."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import ratio_metrics, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register("cispo", clip_low=1.0, clip_high=4.0, denominator="tokens", scales_advantage=True)
def cispo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the CISPO loss per token `[C]` (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5).

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * learner_logprobs
    r = exp(learner_logprobs - proximal_logprobs)

    The paper has no lower bound, as clip_low = 1 has none, and gives no number for the upper one: 5 is TRL's.
    """
    ratio = token_ratios(inputs).detach()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    policy = -clipped * inputs.advantages * inputs.learner_logprobs
    return LossOutput(policy, ratio_metrics(ratio, clipped != ratio))
