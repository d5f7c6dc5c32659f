"""Terms that losses share: the KL to another policy, and the correction for whoever sampled the tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: far beyond any ratio that means something, far below where float32 overflows."""


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Estimate KL(p || q) per token `[C]`, in nats, at tokens sampled from p.

    k3 = exp(d) - d - 1 with d = log q - log p   (Schulman, "Approximating KL divergence", 2020)

    It is never negative, unbiased in value, and has less variance than -d. `logprobs` are log p,
    `other_logprobs` log q, both `[C]`. Gradients flow through both.
    """
    difference = (other_logprobs - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(difference) - difference


def importance_weights(proximal_logprobs: Tensor, engine_logprobs: Tensor, cap: float) -> Tensor:
    """Weigh tokens `[C]` whose engine had other logprobs than the learner: other kernels, older weights.

    w = min(exp(proximal_logprobs - engine_logprobs), cap), without gradient

    Truncated importance sampling (Ionides 2008; Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"), in the place it has in decoupled PPO (Hilton et al., arXiv:2110.00641; AReaL,
    arXiv:2505.24298): it corrects from the behaviour policy (the engine) to the proximal policy (the learner at
    the start of the step), and the clipped ratio then measures the distance from the proximal policy alone.
    """
    with torch.no_grad():
        # The cap is applied to the exponent, so that a huge difference cannot overflow before it is cut.
        return (proximal_logprobs - engine_logprobs).clamp(max=math.log(cap)).exp()
