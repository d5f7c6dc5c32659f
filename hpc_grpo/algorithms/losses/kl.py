"""Estimators of the KL divergence from sampled tokens alone."""

from __future__ import annotations

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: far beyond any ratio that means something, far below where float32 overflows."""


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Per-token estimate `[C]` of KL(p || q), in nats, at tokens sampled from p.

    k3 = exp(d) - d - 1 with d = log q - log p   (Schulman, "Approximating KL divergence", 2020)

    It is never negative, unbiased in value, and has less variance than -d. `logprobs` are log p,
    `other_logprobs` log q, both `[C]`. Gradients flow through both.
    """
    difference = (other_logprobs - logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return torch.expm1(difference) - difference
