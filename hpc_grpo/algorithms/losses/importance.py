"""Correction for engines whose logprobs differ from the learner's: other kernels, older weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def importance_weights(proximal_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Truncated importance weights `[C]`, without gradient.

    w = min(exp(proximal_logprobs - engine_logprobs), cap)

    Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"), in the place it has in decoupled PPO (Hilton et al., arXiv:2110.00641; AReaL,
    arXiv:2505.24298): it corrects from the behaviour policy (the engine) to the proximal policy (the learner at
    the start of the step), and the clipped ratio then measures the distance from the proximal policy alone.
    """
    with torch.no_grad():
        # The cap is applied to the exponent, so that a huge difference cannot overflow before it is cut.
        return (proximal_logprobs - engine_logprobs).clamp(max=math.log(cap)).exp()
