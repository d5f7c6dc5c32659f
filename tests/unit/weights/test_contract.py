from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.contract import _unsharded_shape, contract_differences

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def spec(name: str, *shape: int, dtype: str = "float32") -> ParameterSpec:
    return ParameterSpec(name, shape, dtype)


LEARNER = [
    spec("model.embed_tokens.weight", 100, 8),
    spec("layers.0.attn.q_proj.weight", 8, 8),
    spec("layers.0.attn.k_proj.weight", 4, 8),
    spec("layers.0.attn.v_proj.weight", 4, 8),
    spec("layers.0.attn.q_proj.bias", 8),
    spec("layers.0.attn.k_proj.bias", 4),
    spec("layers.0.attn.v_proj.bias", 4),
    spec("layers.0.mlp.gate_proj.weight", 16, 8),
    spec("layers.0.mlp.up_proj.weight", 16, 8),
    spec("norm.weight", 8),
]
ENGINE = [
    spec("model.embed_tokens.weight", 100, 8),
    spec("layers.0.attn.qkv_proj.weight", 16, 8),
    spec("layers.0.attn.qkv_proj.bias", 16),
    spec("layers.0.mlp.gate_up_proj.weight", 32, 8),
    spec("norm.weight", 8),
]


def with_changed(specs: list[ParameterSpec], changed: ParameterSpec) -> list[ParameterSpec]:
    return [changed if spec.name == changed.name else spec for spec in specs]


def test_fused_layers_agree_with_their_parts() -> None:
    assert contract_differences(LEARNER, ENGINE, PACKED) == []


def test_parameter_the_learner_lacks() -> None:
    learner = [spec for spec in LEARNER if spec.name != "norm.weight"]
    assert contract_differences(learner, ENGINE, PACKED) == [
        "norm.weight: the engine needs it, the learner does not publish it"
    ]


def test_missing_part_of_a_fused_layer_is_named_alone() -> None:
    learner = [spec for spec in LEARNER if spec.name != "layers.0.attn.k_proj.bias"]
    assert contract_differences(learner, ENGINE, PACKED) == [
        "layers.0.attn.k_proj.bias: the engine needs it, the learner does not publish it"
    ]


def test_parameter_the_engine_lacks() -> None:
    learner = [*LEARNER, spec("lm_head.weight", 100, 8)]
    assert contract_differences(learner, ENGINE, PACKED) == [
        "lm_head.weight: the learner publishes it, the engine has no such parameter"
    ]


def test_shape_of_a_plain_parameter() -> None:
    engine = with_changed(ENGINE, spec("norm.weight", 9))
    assert contract_differences(LEARNER, engine, PACKED) == ["norm.weight: learner shape (8,), engine shape (9,)"]


def test_shape_along_the_fused_dimension() -> None:
    learner = with_changed(LEARNER, spec("layers.0.mlp.up_proj.weight", 17, 8))
    assert contract_differences(learner, ENGINE, PACKED) == [
        "layers.0.mlp.gate_up_proj.weight: learner shape (33, 8), engine shape (32, 8)"
    ]


def test_shape_across_the_fused_dimension() -> None:
    learner = with_changed(LEARNER, spec("layers.0.mlp.up_proj.weight", 16, 9))
    assert contract_differences(learner, ENGINE, PACKED) == [
        "layers.0.mlp.gate_up_proj.weight: learner shapes do not fit together: "
        "layers.0.mlp.gate_proj.weight (16, 8), layers.0.mlp.up_proj.weight (16, 9)"
    ]


def test_scalar_parameter() -> None:
    assert contract_differences([spec("scale")], [spec("scale")], PACKED) == []


def test_dtype_of_one_part() -> None:
    learner = with_changed(LEARNER, spec("layers.0.attn.v_proj.bias", 4, dtype="bfloat16"))
    assert contract_differences(learner, ENGINE, PACKED) == [
        "layers.0.attn.qkv_proj.bias: learner dtype ['bfloat16', 'float32'], engine dtype float32"
    ]


def test_all_differences_are_listed_at_once() -> None:
    learner = [*with_changed(LEARNER, spec("norm.weight", 8, dtype="bfloat16"))[1:], spec("extra", 1)]
    assert len(contract_differences(learner, ENGINE, PACKED)) == 3


@pytest.mark.parametrize("world_size", [1, 2])
def test_vocabulary_padding_of_the_engine_is_not_a_difference(world_size: int) -> None:
    """vLLM pads 100 tokens to 128 rows, and a tensor-parallel rank holds its part of them."""
    module = SimpleNamespace(org_vocab_size=100)
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=world_size))
    assert _unsharded_shape(module, "weight", (128 // world_size, 8), vllm_config) == (100, 8)


def test_sharded_linears_are_compared_whole() -> None:
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    column = SimpleNamespace(output_size=16, input_size=8)
    assert _unsharded_shape(column, "weight", (8, 8), vllm_config) == (16, 8)
    assert _unsharded_shape(column, "bias", (8,), vllm_config) == (16,)
    assert _unsharded_shape(SimpleNamespace(), "weight", (8,), vllm_config) == (8,)


def test_kv_heads_that_ranks_hold_copies_of_count_once() -> None:
    """12 query heads and 2 of keys and values on 4 ranks, as Qwen2.5-1.5B has: each rank holds 3 + 1 + 1 heads."""
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=4))
    heads = {"total_num_heads": 12, "total_num_kv_heads": 2, "head_size": 4, "v_head_size": 4}
    qkv = SimpleNamespace(output_size=(12 + 4 + 4) * 4, input_size=8, **heads)
    assert _unsharded_shape(qkv, "weight", (5 * 4, 8), vllm_config) == ((12 + 2 + 2) * 4, 8)
    assert _unsharded_shape(qkv, "bias", (5 * 4,), vllm_config) == ((12 + 2 + 2) * 4,)
