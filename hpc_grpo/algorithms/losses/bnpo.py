"""BNPO as TRL names it: the clipped surrogate, divided by the tokens of the batch."""

from __future__ import annotations

from hpc_grpo.algorithms.losses.base import LossInputs, LossOutput
from hpc_grpo.algorithms.losses.common import clipped_surrogate, token_ratios
from hpc_grpo.config import LossConfig
from hpc_grpo.registry import LOSSES


@LOSSES.register("bnpo", clip_low=0.2, clip_high=0.2, dual_clip=None, denominator="tokens", scales_advantage=True)
def bnpo_loss(inputs: LossInputs, settings: LossConfig) -> LossOutput:
    """Return the loss per token `[C]` that TRL and Liger call `bnpo`.

    L = -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A),   r = exp(learner_logprobs - proximal_logprobs)

    Their batch is what one process has in one microbatch, so their result depends on how a step is cut. Here it is the
    optimizer step: `bnpo` is `grpo` with its default denominator, under the name that other systems' configs have.
    """
    return clipped_surrogate(inputs, settings, token_ratios(inputs))
