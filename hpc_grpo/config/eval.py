"""Sections `eval` and `metrics`: how a run is measured, and where the numbers go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from hpc_grpo.config.section import Section


class EvalConfig(Section):
    every_steps: PositiveInt | None = Field(None, description="null: no eval. Else also at step 0 and at the end.")
    num_samples: PositiveInt = Field(1, description="Completions per prompt, n of pass@k.")
    pass_k: list[PositiveInt] = Field(default_factory=lambda: [1], description="Values of k; at most num_samples.")
    temperature: NonNegativeFloat = Field(1.0, description="0: greedy.")
    reward: str = Field("correctness", description="The reward that decides what counts as solved.")
    solved_at: float = Field(1.0, description="A completion with at least this reward is solved.")


class MetricsConfig(Section):
    wandb_project: str = Field("hpc-grpo", description="Used when WANDB_API_KEY is set, or in offline mode.")
    wandb_entity: str | None = Field(None, description="W&B team; null: your default.")
    wandb_mode: Literal["auto", "offline", "disabled"] = Field(
        "auto", description="auto: online if WANDB_API_KEY is set, else off."
    )
    tensorboard: bool = Field(False, description="Write TensorBoard event files.")
