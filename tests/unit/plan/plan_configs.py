"""Configs and hardware of the tests beside this file."""

from __future__ import annotations

from typing import Any

from hpc_grpo.config import Config, load_config
from hpc_grpo.plan.fit import Plan, make_plan
from hpc_grpo.plan.memory import Hardware, MemoryBudget
from hpc_grpo.plan.model import family_model
from hpc_grpo.types import GIB

GH200 = Hardware(gpu_bytes=96 * GIB, host_bytes=460 * GIB)


def least_config(**sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "model"},
        "data": {"train": {"path": "data"}, "max_prompt_tokens": 1024},
        "rollout": {"prompts_per_step": 64, "group_size": 16, "max_new_tokens": 3072},
    }
    train = {"total_steps": 10, **sections.pop("train", {})}
    merged = {name: {**values.get(name, {}), **sections.get(name, {})} for name in {*values, *sections}}
    return Config.model_validate({**merged, "train": train})


def plan_7b_config(size: str, num_nodes: int, *overrides: str) -> Plan:
    """The shipped 7B config, with another model's shape."""
    config = load_config("isambard/grpo_7b_rlzero_general", overrides)
    return make_plan(family_model(size), config, num_nodes, GH200)


def parts(budget: MemoryBudget) -> dict[str, int]:
    return {part.name: part.num_bytes for part in budget.parts}
