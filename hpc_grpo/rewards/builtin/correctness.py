"""Built-in reward: `math` under the name that it has in older configurations."""

from __future__ import annotations

from hpc_grpo.rewards import reward
from hpc_grpo.rewards.builtin.math import load, math

correctness = reward("correctness", math.settings, load=load)(math.function)
