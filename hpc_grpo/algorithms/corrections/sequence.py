"""Sequence-level truncated importance sampling."""

from __future__ import annotations

import math

from hpc_grpo.algorithms.corrections.base import Weights, mismatch
from hpc_grpo.algorithms.losses.base import LossInputs
from hpc_grpo.algorithms.losses.common import sequence_sum
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import CORRECTIONS


@CORRECTIONS.register("sequence", importance_cap=2.0)
def sequence(inputs: LossInputs, settings: LossConfig) -> Weights:
    """Return w = min(product over the sequence's tokens of proximal / engine, importance_cap) for each of its tokens.

    The unbiased weight of a whole sequence, truncated (Liu et al. 2025, "When Speed Kills Stability"). It falls or
    grows exponentially with the length: long sequences of a small mismatch have a small weight, or the cap.
    """
    log_weights = sequence_sum(mismatch(inputs), inputs.sequence_ids)
    log_cap = math.log(settings.importance_cap)
    return Weights(log_weights.clamp(max=log_cap).exp(), log_weights > log_cap)
