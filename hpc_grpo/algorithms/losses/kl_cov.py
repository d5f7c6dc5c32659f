"""KL-Cov: holds the tokens near the old policy whose learning costs the most entropy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import kl_k3, ratio_metrics, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor


def covariance_bound(minibatch: LossInputs, settings: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean logprob, the mean advantage and the smallest covariance that is held, of an optimizer step."""
    means = minibatch.proximal_logprobs.mean(), minibatch.advantages.mean()
    covariances = (minibatch.proximal_logprobs - means[0]) * (minibatch.advantages - means[1])
    num_held = math.ceil(settings.cov_fraction * len(covariances))
    return (*means, covariances.topk(num_held).values.min())


@LOSSES.register("kl_cov", cov_fraction=2e-4, cov_kl_coef=1.0, denominator="tokens", prepare=covariance_bound)
def kl_cov_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the KL-Cov loss per token `[C]` (arXiv:2505.22617, eq. 14).

    L = -r * A                                                            r = exp(learner_logprobs - proximal_logprobs)
    L = -r * A + cov_kl_coef * KL(proximal || learner)                    of the tokens that are held

    Held is the share cov_fraction of the optimizer step's tokens with the largest covariance of logprob and advantage,
    (log p - mean log p) * (A - mean A), p the proximal policy's. The KL is estimated by k3, unbiased at tokens that
    the proximal policy sampled; the authors' code has |log r|. There is no clip: `policy/clip_fraction` counts what is
    held.
    """
    mean_logprob, mean_advantage, bound = inputs.of_minibatch["kl_cov"]
    ratio = token_ratios(inputs)
    covariance = (inputs.proximal_logprobs - mean_logprob) * (inputs.advantages - mean_advantage)
    is_held = covariance >= bound
    penalty = settings.cov_kl_coef * kl_k3(inputs.proximal_logprobs, inputs.learner_logprobs) * is_held
    return LossOutput(penalty - ratio * inputs.advantages, ratio_metrics(ratio, is_held))
