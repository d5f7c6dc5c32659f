"""A learner's GPU, an engine's GPU with its KV cache, and a node's memory, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.config.train import SftTask
from hpc_grpo.plan.budgets import (
    KvCache,
    communication_part,
    engine_budget,
    host_budget,
    host_parts,
    kv_bytes_per_token,
    learner_budget,
    model_parts,
    shared_memory_budget,
    state_parts,
)
from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.memory import GH200, Hardware, Part
from hpc_grpo.plan.model import FAMILY, Model, ModelShape, family_model
from hpc_grpo.types import GIB
from tests.unit.plan.plan_configs import parts, planned_config

BILLION = Model("a billion", FAMILY["1.5B"], 10**9, "made up")
SEVEN = family_model("7B")
P = SEVEN.num_parameters


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


@pytest.mark.parametrize(("publish", "store"), [("merged", 2 * P), ("adapter", 2 * 40_370_176)])
def test_an_adapter_alone_has_gradients_and_an_optimizer_and_no_reference_beside_it(publish: str, store: int) -> None:
    adapted = SEVEN.shape.adapter_parameters(16, "all-linear")
    config = planned_config(train={"zero_stage": 2}, lora={"publish": publish}, loss={"kl": {"coef": 0.1}})
    assert [part.num_bytes for part in state_parts(SEVEN, config, 2)] == [
        *(2 * P, 2 * adapted, 4 * adapted // 2, 12 * adapted // 2)
    ]
    assert parts(shared_memory_budget(SEVEN, config, GH200))["weight store in /dev/shm"] == store


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
    sft = config.model_copy(update={"task": SftTask()})
    assert "reference model" not in gigabytes(state_parts(BILLION, sft, 2))


@pytest.mark.parametrize(("stage", "whole"), [(2, 1.0), (3, 0.5)])
def test_an_average_in_float32_and_a_teacher_are_counted_beside_the_reference(stage: int, whole: float) -> None:
    loss = {"kl": {"coef": 0.1, "refresh_steps": 1, "mixup": 0.1}}
    sections = {"task": {"name": "distill", "args": {"teacher": "org/large"}}, "train": {"zero_stage": stage}}
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
    # two bfloat16 buckets that take the embedding's gradient, and this gradient in float32
    assert communication_part(seven, planned_config(train={"zero_stage": 2})).num_bytes == 8 * 152_064 * 3584
    # float32 bucket, its copy, 1e9 gathered weights
    assert communication_part(seven, planned_config(train={"zero_stage": 3})).num_bytes == 2e9 + 2e9 + 2e9


def test_a_budget_is_the_sum_of_its_parts() -> None:
    budget = learner_budget(family_model("7B"), planned_config(train={"zero_stage": 3}), 2, GH200)
    named = parts(budget)
    assert budget.num_bytes == sum(named.values())
    tensors = budget.num_bytes - named["allocator's slack"] - named["CUDA context, NCCL"]
    assert named["allocator's slack"] == int(tensors * 0.05)


@pytest.mark.parametrize(("tensor_parallel", "expected"), [(1, 57_344), (2, 28_672), (4, 14_336), (8, 14_336)])
def test_kv_cache_of_a_token_by_hand(tensor_parallel: int, expected: int) -> None:
    # 2 x 28 layers x 4 heads x 128 channels x 2 bytes; a GPU holds at least one head
    assert kv_bytes_per_token(FAMILY["7B"], 2, tensor_parallel) == expected


def test_sequences_take_whole_blocks() -> None:
    cache = KvCache(num_bytes=1000 * 16 + 5, bytes_per_token=10, max_model_len=100)
    assert cache.num_tokens == 1600
    assert cache.num_sequences == 1600 // 112


def test_the_cache_gets_what_the_model_leaves() -> None:
    budget, cache = engine_budget(SEVEN, planned_config(), GH200)
    named = parts(budget)
    assert named["weights (bfloat16)"] == 2 * P
    # 8192 tokens x 2 bytes x (4 x 3584 + 3 x 18944), and four float32 arrays of 256 x 152064
    assert named["largest batch, sampling"] == 8192 * 2 * (14_336 + 56_832) + 16 * 256 * 152_064
    assert budget.num_bytes == budget.capacity_bytes == int(0.9 * 96 * GIB)
    assert cache.num_bytes == named["KV cache"]
    assert cache.num_tokens == named["KV cache"] // (57_344 * 16) * 16


def test_tensor_parallelism_divides_weights_and_heads() -> None:
    budget, cache = engine_budget(SEVEN, planned_config(engine={"tensor_parallel": 2}), GH200)
    assert parts(budget)["weights (bfloat16)"] == P
    assert cache.bytes_per_token == 28_672


def test_a_given_cache_is_counted_against_the_whole_gpu() -> None:
    budget, cache = engine_budget(
        SEVEN, planned_config(engine={"kv_cache_gib": 10, "vllm": {"enforce_eager": True}}), GH200
    )
    assert cache.num_bytes == 10 * GIB
    assert budget.capacity_bytes == 96 * GIB
    assert parts(budget)["CUDA context"] == 1 * GIB


def test_an_engine_that_has_no_room_for_one_sequence_does_not_fit() -> None:
    budget, cache = engine_budget(family_model("72B"), planned_config(), GH200)
    assert not budget.fits
    assert cache.num_sequences == 1
    small = make_plan(SEVEN, planned_config(engine={"kv_cache_gib": 0.01}), 2, GH200)
    assert any("raise engine.kv_cache_gib" in problem for problem in small.problems)


def test_an_engine_on_cpu_takes_fewer_tokens_at_once() -> None:
    [_, batch] = model_parts(SEVEN, planned_config(model={"device": "cpu"}, rollout={"max_new_tokens": 512}))
    assert batch.num_bytes == 2048 * 2 * (14_336 + 56_832) + 16 * 256 * 152_064


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


def test_replayed_experts_take_a_byte_for_each_expert_of_a_token_in_each_layer() -> None:
    """Qwen3-30B-A3B: 48 layers, 8 experts a token; 64 x 16 sequences of 4,096 tokens."""
    shape = ModelShape(2048, 48, 32, 4, 128, 768, 151_936, num_experts=128, experts_per_token=8)
    model, name, of_step = Model("mixture", shape, 3 * 10**10, "made up"), "experts of a step's tokens", 384 * 2**22
    config = planned_config(train={"router_replay": True}, placement={"learners_per_node": 2})
    assert parts(learner_budget(model, config, 4, GH200))[name] == of_step // 4
    on_node = parts(host_budget(model, config, 4, 2 * 48 * 4 * 128 * 2 * 16 * 1000, GH200))
    assert on_node[name] == of_step // 2
    assert on_node["engines: experts of cached tokens"] == 3 * 384 * 16_000
    assert replace(shape, num_experts=257).routed_bytes == 2 * shape.routed_bytes == 768
    without = planned_config(placement={"learners_per_node": 2})
    assert not {own for own in parts(host_budget(model, without, 4, 2**30, GH200)) if "experts" in own}


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
