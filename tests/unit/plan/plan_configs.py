"""Configs and plans of the tests beside this file."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from hpc_grpo.config import Config, load_config
from hpc_grpo.plan.fit import Plan, make_plan
from hpc_grpo.plan.memory import GH200, MemoryBudget
from hpc_grpo.plan.model import family_model
from hpc_grpo.simulate.placement import Split, ranked_splits
from tests.support.configs import minimal_config


def planned_config(**sections: Any) -> Config:
    """Make a config whose step is worth planning: 64 groups of 16 sequences of 1,024 + 3,072 tokens."""
    step = {
        "data": {"max_prompt_tokens": 1024},
        "rollout": {"prompts_per_step": 64, "group_size": 16, "max_new_tokens": 3072},
    }
    return minimal_config(step, **sections)


PLACEMENTS = [
    pytest.param(size, num_nodes, marks=[pytest.mark.long] * (num_nodes in (2, 4)))
    for size in ("0.5B", "1.5B", "7B", "14B", "32B")
    for num_nodes in (1, 2, 4, 8)
]
"""The rows of the table in docs/memory.md. Each takes seconds to simulate, so some are left to `make long`."""
AS_THE_CARD = ("placement.learners_per_node=1", "engine.engines_per_node=3", "rollout.max_policy_lag=0")


def plan_7b_config(size: str, num_nodes: int, *overrides: str) -> Plan:
    """Plan the shipped 7B config's step with another model's shape, and one learner and three engines on each node."""
    return plan_shipped_7b(size, num_nodes, *AS_THE_CARD, *overrides)


def plan_shipped_7b(size: str, num_nodes: int, *overrides: str) -> Plan:
    """Plan the shipped 7B config with another shape, and two learners and two engines a node, which sample ahead."""
    two_and_two = ("placement.learners_per_node=2", "engine.engines_per_node=2")
    config = load_config("isambard/grpo_7b_rlzero_general", (*two_and_two, *overrides))
    return make_plan(family_model(size), config, num_nodes, GH200)


@functools.cache
def splits_of(size: str, num_nodes: int, *overrides: str) -> list[Split]:
    return ranked_splits(plan_7b_config(size, num_nodes, *overrides))


def parts(budget: MemoryBudget) -> dict[str, int]:
    return {part.name: part.num_bytes for part in budget.parts}
