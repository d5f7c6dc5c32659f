"""Clip-Cov: takes the gradient of a few tokens, drawn at random from those whose learning costs entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES

if TYPE_CHECKING:
    from torch import Tensor


def largest_draw(minibatch: LossInputs, settings: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean logprob, the mean advantage and the largest draw that is left out, of an optimizer step."""
    means = minibatch.proximal_logprobs.mean(), minibatch.advantages.mean()
    draws = _draws_between(minibatch, settings, *means)
    num_left_out = max(int(settings.cov_fraction * len(draws)), 1)
    return (*means, draws.topk(num_left_out, largest=False).values.max())


@LOSSES.register(
    "clip_cov",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    cov_fraction=2e-4,
    args={"cov_low": 1.0, "cov_high": 5.0},
    denominator="tokens",
    prepare=largest_draw,
)
def clip_cov_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the Clip-Cov loss per token `[C]` (arXiv:2505.22617, eq. 11 and 12).

    L = -min(r * A, clip(r) * A)        r = exp(learner_logprobs - proximal_logprobs)
    L = 0                               of the tokens that are left out

    Left out are as many tokens as the share cov_fraction of the optimizer step's, at least one, drawn at random from
    those with cov_low < (log p - mean log p) * (A - mean A) < cov_high, p the proximal policy's; all of them where
    there are fewer. Who is drawn depends on the token alone (`LossInputs.draws`), the number and the means on the whole
    optimizer step: not on ranks, packing or microbatches. The authors' code takes the learner's logprobs, equal to the
    proximal ones in a step's first minibatch, and does not draw tokens that the clip has taken already.
    """
    mean_logprob, mean_advantage, bound = inputs.of_minibatch["clip_cov"]
    surrogate = clipped_surrogate(inputs, settings, token_ratios(inputs))
    draws = _draws_between(inputs, settings, mean_logprob, mean_advantage)
    is_left_out = (draws <= bound) & (draws < _NEVER)
    metrics = surrogate.means | {"policy/left_out_fraction": is_left_out.to(draws.dtype)}
    return LossOutput(surrogate.per_token * ~is_left_out, metrics)


_NEVER = 1.0
"""Stands for the draw of a token that is no candidate: above all draws."""


def _draws_between(inputs: LossInputs, settings: LossConfig, mean_logprob: Tensor, mean_advantage: Tensor) -> Tensor:
    """Return the draws `[C]` of the tokens whose covariance lies between the bounds. Raises ValueError without any."""
    if inputs.draws is None:
        raise ValueError("clip_cov chooses tokens at random: give LossInputs.draws")
    covariance = (inputs.proximal_logprobs - mean_logprob) * (inputs.advantages - mean_advantage)
    is_between = (covariance > settings.args["cov_low"]) & (covariance < settings.args["cov_high"])
    return inputs.draws.where(is_between, _NEVER)
