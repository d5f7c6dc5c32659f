"""GSPO-token: the sequence's ratio, with a gradient and an advantage of each token's own."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, sequence_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register(
    "gspo_token", clip_low=3e-4, clip_high=4e-4, dual_clip=None, denominator="sequences", scales_advantage=True
)
def gspo_token_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the GSPO-token loss per token `[C]` (arXiv:2507.18071, eq. 13 and 14).

    L = -min(s_t * A_t, clip(s_t, 1 - clip_low, 1 + clip_high) * A_t)
    s_t = sg(s) * exp(learner_logprobs - sg(learner_logprobs)),   s as in gspo, sg: without gradient

    Equal to gspo in value, and in gradient where the advantage is the same all over the sequence.
    """
    own = (inputs.learner_logprobs - inputs.learner_logprobs.detach()).exp()
    return clipped_surrogate(inputs, settings, sequence_ratios(inputs).detach() * own)
