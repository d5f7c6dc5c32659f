"""M2PO: the tokens of the largest mismatch are masked until the second moment of the others is small enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_grpo.algorithms.corrections.base import Weights, mismatch, weights_within
from hpc_grpo.algorithms.losses.base import LossInputs
from hpc_grpo.algorithms.losses.common import MAX_LOG_RATIO
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import CORRECTIONS

if TYPE_CHECKING:
    from torch import Tensor


def second_moment_bound(minibatch: LossInputs, settings: LossConfig) -> Tensor:
    """Return the largest (log r)^2 that is kept of all tokens of an optimizer step; -1.0 where none is."""
    squares = mismatch(minibatch).square().sort().values
    means = squares.cumsum(0) / squares.new_ones(len(squares)).cumsum(0)
    # Means of ever larger squares grow, so those within the bound come first.
    num_kept = (means <= settings.importance_cap).sum()
    return squares.gather(0, (num_kept - 1).clamp(min=0).unsqueeze(0)).squeeze(0).where(num_kept > 0, -1.0)


@CORRECTIONS.register("m2po", importance_cap=0.04, prepare=second_moment_bound)
def m2po(inputs: LossInputs, settings: LossConfig) -> Weights:
    """Return w = r = proximal / engine of each token that is kept, and 0 of the others.

    Masked are the tokens of the largest (log r)^2, as few as leave the others a mean of at most importance_cap
    (M2PO, arXiv:2510.01161, algorithm 1): over all tokens of the optimizer step, however it is cut. The paper's
    surrogate has no clip besides; ours has that of the loss, around the proximal policy.
    """
    log_weights = mismatch(inputs)
    is_kept = log_weights.square() <= inputs.of_minibatch["m2po"]
    return weights_within(log_weights.clamp(max=MAX_LOG_RATIO), is_kept)
