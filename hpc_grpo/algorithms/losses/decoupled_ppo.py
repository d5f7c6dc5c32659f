"""Decoupled PPO as AReaL has it: the clip around a proximal policy, weighed from the behaviour policy."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register(
    "decoupled_ppo",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    denominator="tokens",
    importance_correction="icepop",
    importance_low=0.0,
    importance_cap=5.0,
    scales_advantage=True,
)
def decoupled_ppo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the surrogate of decoupled PPO per token `[C]` (arXiv:2110.00641; AReaL, arXiv:2505.24298, eq. 5).

    L = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),   r = exp(learner_logprobs - proximal_logprobs)
    w = exp(proximal_logprobs - engine_logprobs) where that is at most importance_cap, else 0

    w is a correction, `corrections/icepop.py` without its lower bound. `loss.proximal` says where the proximal
    logprobs come from.
    """
    return clipped_surrogate(inputs, settings, token_ratios(inputs))
