"""IcePop: tokens whose mismatch lies outside the bounds are masked, not truncated."""

from __future__ import annotations

from hpc_grpo.algorithms.corrections.base import Weights, mismatch, weights_within
from hpc_grpo.algorithms.losses.base import LossInputs
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import CORRECTIONS


@CORRECTIONS.register("icepop", importance_low=0.5, importance_cap=5.0)
def icepop(inputs: LossInputs, settings: LossConfig) -> Weights:
    """Return w = proximal / engine of each token if importance_low <= w <= importance_cap, else 0.

    Ring-Team 2025, "Small leak can sink a great ship", and Ling Team, arXiv:2510.18855. With importance_low = 0 it is
    the cap on behaviour weights of AReaL (arXiv:2505.24298), which masks too.
    """
    log_weights = mismatch(inputs)
    ratio = log_weights.double().exp()
    return weights_within(log_weights, (ratio >= settings.importance_low) & (ratio <= settings.importance_cap))
