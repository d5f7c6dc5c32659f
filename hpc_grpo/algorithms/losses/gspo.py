"""GSPO: one ratio for a whole sequence."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, sequence_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register("gspo", clip_low=3e-4, clip_high=4e-4, dual_clip=None, denominator="sequences", scales_advantage=True)
def gspo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the GSPO loss per token `[C]` (arXiv:2507.18071, eq. 5 to 7).

    L = -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)
    s = exp(mean over the sequence's tokens of learner_logprobs - proximal_logprobs)

    All tokens of a sequence have the same s, so with `denominator: sequences` the mean over them is the paper's term.
    """
    return clipped_surrogate(inputs, settings, sequence_ratios(inputs))
