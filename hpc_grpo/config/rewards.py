"""Sections `rewards` and `grading`: the functions that grade a completion, and the processes they run in."""

from __future__ import annotations

from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from hpc_grpo.config.section import Fraction, Section


class RewardConfig(Section):
    name: str = Field(description="A reward of rewards/builtin, or module:function.")
    weight: float = Field(1.0, description="Factor of this reward in the sum.")
    timeout_s: PositiveFloat = Field(10.0, description="Deadline of one call (one group).")
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reward.")


class GradingConfig(Section):
    num_workers: PositiveInt = Field(2, description="Reward processes on each node.")
    max_failed_fraction: Fraction = Field(
        0.1, description="A larger share of prompts whose reward failed in a step stops the run."
    )
