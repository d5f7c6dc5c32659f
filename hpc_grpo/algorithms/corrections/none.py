"""No correction: every token has weight 1."""

from __future__ import annotations

from hpc_grpo.algorithms.corrections.base import Weights, mismatch
from hpc_grpo.algorithms.losses.base import LossInputs
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import CORRECTIONS


@CORRECTIONS.register("none", importance_low=None, importance_cap=None)
def no_correction(inputs: LossInputs, settings: LossConfig) -> Weights:
    """Return w = 1. Bounds may stay in the config of a run that switches its correction off."""
    weights = mismatch(inputs).new_ones(len(inputs.sequence_ids))
    return Weights(weights, weights < 0.0)
