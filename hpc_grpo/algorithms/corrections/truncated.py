"""Token-level truncated importance sampling."""

from __future__ import annotations

import math

from hpc_grpo.algorithms.corrections.base import Weights, mismatch
from hpc_grpo.algorithms.losses.base import LossInputs
from hpc_grpo.algorithms.losses.common import importance_weights
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import CORRECTIONS


@CORRECTIONS.register("truncated", importance_cap=2.0)
def truncated(inputs: LossInputs, settings: LossConfig) -> Weights:
    """Return w = min(proximal / engine, importance_cap) of each token (`losses.common.importance_weights`)."""
    weights = importance_weights(inputs.proximal_logprobs, inputs.engine_logprobs, settings.importance_cap)
    return Weights(weights, mismatch(inputs) > math.log(settings.importance_cap))
