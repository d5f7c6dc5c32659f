"""Rewards: functions of text and nothing else. A built-in is one file of `builtin/`, found by `hpc_grpo.registry`.

A reward is `f(prompts, completions, **fields) -> list[float]`: texts, and for each column of the data set (and
`answer`) a list with one value per completion, as in TRL. `rewards.args` arrive as keyword arguments as they are, and
win over a column of the same name.

It may be `async`. An attribute `prepare` of it is called once before training, with `rewards.args`: it raises
ConfigError where the reward could not work, and returns what the user should know, or None.

This file imports the registry alone: every worker loads it, and starts as fast as its imports are few.
"""

from collections.abc import Callable
from typing import Any

from hpc_grpo.registry import REWARDS

RewardFunction = Callable[..., Any]


def reward(name: str, prepare: Callable[..., Any] | None = None) -> Callable[[RewardFunction], RewardFunction]:
    """Decorate a built-in: `@reward("math")` in `builtin/math.py`."""

    def add(function: RewardFunction) -> RewardFunction:
        if prepare is not None:
            function.prepare = prepare  # type: ignore[attr-defined]
        return REWARDS.register(name)(function)

    return add
