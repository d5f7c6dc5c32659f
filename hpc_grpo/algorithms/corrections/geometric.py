"""Sequences whose mean mismatch lies outside the bounds are masked whole."""

from __future__ import annotations

from hpc_grpo.algorithms.corrections.base import Weights, mismatch, weights_within
from hpc_grpo.algorithms.losses.base import LossInputs
from hpc_grpo.algorithms.losses.common import MAX_LOG_RATIO, sequence_mean
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import CORRECTIONS


@CORRECTIONS.register("geometric", importance_low=0.999, importance_cap=1.002)
def geometric(inputs: LossInputs, settings: LossConfig) -> Weights:
    """Return w = proximal / engine of each token if importance_low <= g <= importance_cap for its sequence, else 0.

    g = exp(mean over the sequence's tokens of log(proximal / engine)), which does not depend on the length
    (Liu et al. 2025, "When Speed Kills Stability"; the bounds are those of NeMo-RL's seq-mask-tis).
    """
    log_weights = mismatch(inputs)
    mean = sequence_mean(log_weights, inputs.sequence_ids).double().exp()
    is_kept = (mean >= settings.importance_low) & (mean <= settings.importance_cap)
    return weights_within(log_weights.clamp(max=MAX_LOG_RATIO), is_kept)
