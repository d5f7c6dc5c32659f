"""Formulas of the learner against numbers worked out by hand, and against what autograd keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.config import Config
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.learner.model import PolicyModel, load_policy
from hpc_grpo.learner.packing import pack
from hpc_grpo.plan.learner_memory import communication_part, host_parts, learner_budget, state_parts
from hpc_grpo.plan.memory import Part, activations, layer_bytes_per_token, pinned_rounding_bytes
from hpc_grpo.plan.model import FAMILY, Model, family_model, read_model
from tests.support.sequences import ordinary_sequence
from tests.unit.plan.plan_configs import GH200, least_config, parts

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
    config = least_config(train={"zero_stage": stage})
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
    config = least_config(train={"zero_stage": stage, "offload_optimizer": "cpu"})
    assert gigabytes(state_parts(BILLION, config, 2)) == on_gpu
    host = gigabytes(host_parts(BILLION, config, 2, learners_on_node=1))
    assert host.pop("rounding of page-locked arrays") > 0
    assert host == on_host
    two = gigabytes(host_parts(BILLION, config, 2, learners_on_node=2))
    assert two["optimizer"] == 2 * on_host["optimizer"]


def test_no_offload_leaves_the_host_alone() -> None:
    assert host_parts(BILLION, least_config(), 2, learners_on_node=1) == []


def test_page_locked_arrays_are_rounded_to_powers_of_two() -> None:
    assert pinned_rounding_bytes([1 << 30, (1 << 30) + 1, 0]) == (1 << 30) - 1


@pytest.mark.parametrize(("stage", "expected"), [(1, 2.0), (2, 2.0), (3, 1.0)])
def test_the_reference_is_sharded_under_stage_3_alone(stage: int, expected: float) -> None:
    config = least_config(train={"zero_stage": stage}, loss={"kl_coef": 0.1})
    assert gigabytes(state_parts(BILLION, config, 2))["reference model"] == expected
    sft = config.model_copy(update={"task": "sft"})
    assert "reference model" not in gigabytes(state_parts(BILLION, sft, 2))


def test_activations_of_7b_by_hand() -> None:
    shape = FAMILY["7B"]
    # 16 x 3584 + 2 x (3 x 3584 + 2 x 512) + 4 x 28 + 8 x 18944
    assert layer_bytes_per_token(shape, 2) == 57_344 + 23_552 + 112 + 151_552
    peak = activations(shape, 2, 16_384, 1024, is_checkpointed=True)
    assert peak.kept == 28 * 16_384 * 2 * 3584
    assert peak.one_layer == 16_384 * (232_560 + 4 * 18_944)
    assert peak.head == 20 * 1024 * 152_064 + 4 * 152_064 * 3584
    assert peak.working == max(peak.one_layer, peak.head)
    kept = activations(shape, 2, 16_384, 1024, is_checkpointed=False).kept
    assert kept == 28 * 16_384 * 232_560


def test_a_microbatch_shorter_than_a_chunk_has_fewer_logits() -> None:
    short = activations(FAMILY["7B"], 2, 100, 1024, is_checkpointed=True)
    assert short.head == 20 * 100 * 152_064 + 4 * 152_064 * 3584


def test_communication_by_hand() -> None:
    seven = family_model("7B")
    assert communication_part(seven, least_config(train={"zero_stage": 1})).num_bytes == 0
    # two bfloat16 buckets of 5e8, and the embedding's gradient in float32
    assert communication_part(seven, least_config(train={"zero_stage": 2})).num_bytes == 2e9 + 4 * 152_064 * 3584
    # float32 bucket, its copy, 1e9 gathered weights
    assert communication_part(seven, least_config(train={"zero_stage": 3})).num_bytes == 2e9 + 2e9 + 2e9


def test_a_budget_is_the_sum_of_its_parts() -> None:
    budget = learner_budget(family_model("7B"), least_config(train={"zero_stage": 3}), 2, GH200)
    named = parts(budget)
    assert budget.num_bytes == sum(named.values())
    tensors = budget.num_bytes - named["allocator's slack"] - named["CUDA context, NCCL"]
    assert named["allocator's slack"] == int(tensors * 0.05)


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Model, Config]:
    size = ModelSize(hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=512)
    write_model(tmp_path, size, seed=0)
    config = least_config(
        model={"path": str(tmp_path), "device": "cpu"},
        data={"max_prompt_tokens": 16},
        rollout={"max_new_tokens": 32},
    )
    return read_model(str(tmp_path), {}), config


def bytes_kept(policy: PolicyModel, num_tokens: int) -> int:
    """What autograd keeps for the backward pass of two documents, parameters aside."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in policy.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = np.arange(num_tokens // 2, dtype=np.int32) % 200 + 2
    sequences = [ordinary_sequence(index, 0, tokens, 8) for index in range(2)]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = policy(pack(sequences))
    total = sum(storage.nbytes() for storage in kept.values())
    del outputs
    return total


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_autograd_keeps_what_the_formula_says(tiny: tuple[Model, Config], dtype: str) -> None:
    model, config = tiny
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    num_tokens = 512
    measured = bytes_kept(load_policy(config, use_gradient_checkpointing=False), num_tokens)
    reckoned = activations(model.shape, {"bfloat16": 2, "float32": 4}[dtype], num_tokens, 1024, is_checkpointed=False)
    assert measured == pytest.approx(reckoned.kept, rel=0.1)
