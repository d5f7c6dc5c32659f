"""Section `loss`: the policy loss and its advantages."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from hpc_grpo.config.section import Section


class LossConfig(Section):
    name: str = Field("grpo", description="A loss of algorithms/losses, or module:function.")
    clip_low: PositiveFloat = Field(0.2, description="The ratio is clipped below at 1 - clip_low.")
    clip_high: PositiveFloat = Field(0.2, description="The ratio is clipped above at 1 + clip_high.")
    kl_coef: NonNegativeFloat = Field(0.0, description="Weight of the k3 KL to the reference; 0: no reference.")
    advantage: str = Field("group", description="An advantage of algorithms/advantages, or module:function.")
    normalize_std: bool = Field(True, description="Divide advantages by the standard deviation of the group.")
    importance_correction: Literal["truncated", "none"] = Field(
        "truncated", description="Correct for the mismatch of engine and learner logprobs."
    )
    importance_cap: PositiveFloat = Field(2.0, description="Upper bound of the importance weight.")
