"""A node's host memory and its part in /dev/shm, by hand."""

from __future__ import annotations

from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.memory import (
    GH200,
    Hardware,
)
from hpc_grpo.plan.model import family_model
from hpc_grpo.plan.node_memory import host_budget, shared_memory_budget
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import parts, planned_config

SEVEN = family_model("7B")
P = SEVEN.num_parameters


def test_host_memory_by_hand() -> None:
    config = planned_config(
        launch={"object_store_gib": 16},
        train={"zero_stage": 2, "offload_optimizer": "cpu"},
    )
    named = parts(host_budget(SEVEN, config, 1, 0, GH200))
    assert named.pop("rounding of page-locked arrays") == 2 * (32 * GIB - 4 * P) + 16 * GIB - 2 * P
    assert named == {
        "weight store in /dev/shm": 2 * P,
        "Ray's object store in /dev/shm": 16 * GIB,
        "optimizer (float32 weights, moments)": 12 * P,
        "gradients (float32)": 4 * P,
        "copies on their way to the GPU": 2 * P,
        "processes": int((4 * 5 + 0.5 + 4) * GIB),
    }
    shared = shared_memory_budget(SEVEN, config, GH200)
    assert shared.num_bytes == 2 * P + 16 * GIB
    assert shared.capacity_bytes == 230 * GIB


def test_a_learner_of_two_on_a_node_offloads_half() -> None:
    config = planned_config(
        train={"zero_stage": 3, "offload_optimizer": "cpu"},
        placement={"learners_per_node": 2},
        engine={"engines_per_node": 2},
    )
    named = parts(host_budget(SEVEN, config, 2, 0, GH200))
    assert named["optimizer (float32 weights, moments)"] == 12 * P


def test_on_cpu_everything_is_host_memory() -> None:
    config = planned_config(model={"device": "cpu", "dtype": "float32"}, engine={"engines_per_node": 2})
    small = family_model("0.5B")
    plan = make_plan(small, config, 1, Hardware(1, 200 * GIB))
    assert [budget.device for budget in plan.budgets] == ["node's host memory", "node's shared memory"]
    named = parts(plan.budgets[0])
    assert named["learner: weights (float32)"] == 4 * small.num_parameters
    assert named["engines: weights, largest batch"] >= 2 * 4 * small.num_parameters
    assert named["engines: KV cache"] == 2 * GIB // 4
