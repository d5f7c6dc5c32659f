"""The signature of every correction. Importing it needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hpc_grpo.algorithms.losses.base import LossInputs

if TYPE_CHECKING:
    from torch import Tensor

    from hpc_grpo.config import LossConfig


@dataclass(frozen=True)
class Weights:
    """`weights` `[C]` multiply the policy term, 0.0 where a token is masked; `bounded` `[C]` tells where a bound acted.

    Neither carries a gradient.
    """

    weights: Tensor
    bounded: Tensor


class Correction(Protocol):
    def __call__(self, inputs: LossInputs, settings: LossConfig) -> Weights: ...


def mismatch(inputs: LossInputs) -> Tensor:
    """Return log(proximal / engine) of each token `[C]`: how much likelier the learner has it than its engine had."""
    return (inputs.proximal_logprobs - inputs.engine_logprobs).detach()


def weights_within(log_weights: Tensor, is_kept: Tensor) -> Weights:
    """Weigh by exp(log_weights) where `is_kept`, and mask the others."""
    # Masked before the exponential: what lies outside the bounds may overflow.
    weights = log_weights.where(is_kept, log_weights.new_zeros(())).exp()
    return Weights(weights * is_kept, ~is_kept)
