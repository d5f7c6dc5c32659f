"""A learner's parts by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.plan.learner_memory import communication_part, host_parts, learner_budget, state_parts
from hpc_grpo.plan.memory import (
    GH200,
    Part,
)
from hpc_grpo.plan.model import FAMILY, Model, family_model
from tests.unit.plan.plan_configs import parts, planned_config

BILLION = Model("a billion", FAMILY["1.5B"], 10**9, "made up")


def gigabytes(found: list[Part]) -> dict[str, float]:
    return {part.name.split(" (")[0]: part.num_bytes / 1e9 for part in found if part.num_bytes}


@pytest.mark.parametrize(
    ("stage", "num_learners", "expected"),
    [
        (1, 1, {"weights": 2, "gradients": 6, "optimizer": 12}),
        (1, 4, {"weights": 2, "gradients": 6, "optimizer": 3}),
        (2, 1, {"weights": 2, "gradients": 4, "optimizer": 12}),
        (2, 4, {"weights": 2, "gradients": 1, "optimizer": 3}),
        (3, 4, {"weights": 0.5, "gradients": 1, "optimizer": 3}),
    ],
)
def test_states_of_a_billion_parameters(stage: int, num_learners: int, expected: dict[str, float]) -> None:
    config = planned_config(train={"zero_stage": stage})
    assert gigabytes(state_parts(BILLION, config, num_learners)) == expected


@pytest.mark.parametrize(
    ("stage", "on_gpu", "on_host"),
    [
        (2, {"weights": 2, "gradients": 2}, {"optimizer": 6, "gradients": 2, "copies on their way to the GPU": 1}),
        (3, {"weights": 1}, {"optimizer": 6, "gradients": 4}),
    ],
)
def test_offload_moves_the_optimizer_to_the_host(
    stage: int, on_gpu: dict[str, float], on_host: dict[str, float]
) -> None:
    config = planned_config(train={"zero_stage": stage, "offload_optimizer": "cpu"})
    assert gigabytes(state_parts(BILLION, config, 2)) == on_gpu
    host = gigabytes(host_parts(BILLION, config, 2, learners_on_node=1))
    assert host.pop("rounding of page-locked arrays") > 0
    assert host == on_host
    two = gigabytes(host_parts(BILLION, config, 2, learners_on_node=2))
    assert two["optimizer"] == 2 * on_host["optimizer"]


def test_a_critic_takes_as_much_as_the_policy(tmp_path: Path) -> None:
    algorithm = "from hpc_grpo.algorithms.tasks import Grpo\nfrom hpc_grpo.types import Needs\nclass Ppo(Grpo):\n"
    (tmp_path / "ppo.py").write_text(f"{algorithm}    needs = Needs(rollouts=True, critic=True)\n")
    config = planned_config(task=f"{tmp_path / 'ppo.py'}:Ppo", train={"zero_stage": 2})
    found = gigabytes(state_parts(BILLION, config, 4))
    policy = {"weights": 2, "gradients": 1, "optimizer": 3}
    assert found == policy | {f"critic: {name}": size for name, size in policy.items()}


def test_no_offload_leaves_the_host_alone() -> None:
    assert host_parts(BILLION, planned_config(), 2, learners_on_node=1) == []


@pytest.mark.parametrize(("stage", "expected"), [(1, 2.0), (2, 2.0), (3, 1.0)])
def test_the_reference_is_sharded_under_stage_3_alone(stage: int, expected: float) -> None:
    config = planned_config(train={"zero_stage": stage}, loss={"kl": {"coef": 0.1}})
    assert gigabytes(state_parts(BILLION, config, 2))["reference model"] == expected
    sft = config.model_copy(update={"task": "sft"})
    assert "reference model" not in gigabytes(state_parts(BILLION, sft, 2))


@pytest.mark.parametrize(("stage", "whole"), [(2, 1.0), (3, 0.5)])
def test_an_average_in_float32_and_a_teacher_are_counted_beside_the_reference(stage: int, whole: float) -> None:
    loss = {"kl": {"coef": 0.1, "refresh_steps": 1, "mixup": 0.1}}
    sections = {"task": "distill", "distill": {"teacher": "org/large"}, "train": {"zero_stage": stage}}
    taught = replace(BILLION, teacher_parameters=3 * 10**9)
    found = gigabytes(state_parts(taught, planned_config(**sections, loss=loss), 2))
    extra = {"reference model": 2 * whole, "reference's average": 4 * whole, "teacher": 6 * whole}
    assert extra.items() <= found.items()
    others = replace(taught, reference_parameters=5 * 10**9)
    assert gigabytes(state_parts(others, planned_config(**sections, loss=loss), 2))["reference model"] == 10 * whole
    copied = planned_config(**sections, loss={"kl": {**loss["kl"], "mixup": 1.0}})
    assert "reference's average" not in gigabytes(state_parts(taught, copied, 2))


def test_communication_by_hand() -> None:
    seven = family_model("7B")
    assert communication_part(seven, planned_config(train={"zero_stage": 1})).num_bytes == 0
    # two bfloat16 buckets of 5e8, and the embedding's gradient in float32
    assert communication_part(seven, planned_config(train={"zero_stage": 2})).num_bytes == 2e9 + 4 * 152_064 * 3584
    # float32 bucket, its copy, 1e9 gathered weights
    assert communication_part(seven, planned_config(train={"zero_stage": 3})).num_bytes == 2e9 + 2e9 + 2e9


def test_a_budget_is_the_sum_of_its_parts() -> None:
    budget = learner_budget(family_model("7B"), planned_config(train={"zero_stage": 3}), 2, GH200)
    named = parts(budget)
    assert budget.num_bytes == sum(named.values())
    tensors = budget.num_bytes - named["allocator's slack"] - named["CUDA context, NCCL"]
    assert named["allocator's slack"] == int(tensors * 0.05)
