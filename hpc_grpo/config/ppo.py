"""Section `ppo`: what PPO has besides its loss: the critic and the advantages made with it."""

from __future__ import annotations

from pydantic import Field, PositiveFloat

from hpc_grpo.config.section import Fraction, Section


class PpoConfig(Section):
    critic_lr: PositiveFloat = Field(1e-5, description="Learning rate of the critic, constant.")
    discount: Fraction = Field(1.0, description="Gamma: worth of a reward one token later.")
    gae_lambda: Fraction = Field(0.95, description="Lambda of the generalised advantages; 1: the whole return.")
    value_clip: PositiveFloat | None = Field(0.2, description="A value moves so far a step; null: freely.")
    normalize_advantages: bool = Field(True, description="Give a step's advantages mean 0 and deviation 1.")
