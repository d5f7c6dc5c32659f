"""Rewards: functions of text and nothing else. A built-in is one file of `builtin/`, found by `hpc_grpo.registry`.

A reward is `f(prompts, completions, **fields) -> list[float]`: texts, and for each column of the data set (and
`answer`) a list with one value per completion, as in TRL. `rewards.args` arrive as keyword arguments as they are, and
win over a column of the same name.

This file imports the registry alone: every worker loads it, and starts as fast as its imports are few.
"""

from collections.abc import Callable, Sequence

from hpc_grpo.registry import REWARDS

RewardFunction = Callable[..., Sequence[float]]

reward = REWARDS.register
"""Decorates a built-in: `@reward("correctness")` in `builtin/correctness.py`."""
