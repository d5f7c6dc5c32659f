"""DAPO: token-level, with more room above than below."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register("dapo", clip_low=0.2, clip_high=0.28, dual_clip=None, denominator="tokens", scales_advantage=True)
def dapo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the DAPO loss per token `[C]` (arXiv:2503.14476, eq. 8).

    L = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),   r = exp(learner_logprobs - proximal_logprobs)

    Its other parts are keys of their own: `rollout.overlong_tokens`, `rollout.drop_zero_variance`, `kl_coef: 0`.
    """
    return clipped_surrogate(inputs, settings, token_ratios(inputs))
