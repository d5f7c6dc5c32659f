from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.contract import ALSO_LANGUAGE_MODELS, contract_differences, refuse_experts, refuse_images

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


def test_a_parameter_the_learner_lacks_is_named() -> None:
    learner = [spec for spec in LEARNER if spec.name != "norm.weight"]
    assert contract_differences(learner, ENGINE, PACKED) == [
        "norm.weight: the engine needs it, the learner does not publish it"
    ]


def test_missing_part_of_a_fused_layer_is_named_alone() -> None:
    learner = [spec for spec in LEARNER if spec.name != "layers.0.attn.k_proj.bias"]
    assert contract_differences(learner, ENGINE, PACKED) == [
        "layers.0.attn.k_proj.bias: the engine needs it, the learner does not publish it"
    ]


def test_a_parameter_the_engine_lacks_is_named() -> None:
    learner = [*LEARNER, spec("lm_head.weight", 100, 8)]
    assert contract_differences(learner, ENGINE, PACKED) == [
        "lm_head.weight: the learner publishes it, the engine has no such parameter"
    ]


def test_another_shape_of_a_plain_parameter_is_a_difference() -> None:
    engine = with_changed(ENGINE, spec("norm.weight", 9))
    assert contract_differences(LEARNER, engine, PACKED) == ["norm.weight: learner shape (8,), engine shape (9,)"]


def test_another_size_along_the_fused_dimension_is_a_difference() -> None:
    learner = with_changed(LEARNER, spec("layers.0.mlp.up_proj.weight", 17, 8))
    assert contract_differences(learner, ENGINE, PACKED) == [
        "layers.0.mlp.gate_up_proj.weight: learner shape (33, 8), engine shape (32, 8)"
    ]


def test_parts_that_do_not_fit_side_by_side_are_a_difference() -> None:
    learner = with_changed(LEARNER, spec("layers.0.mlp.up_proj.weight", 16, 9))
    assert contract_differences(learner, ENGINE, PACKED) == [
        "layers.0.mlp.gate_up_proj.weight: learner shapes do not fit together: "
        "layers.0.mlp.gate_proj.weight (16, 8), layers.0.mlp.up_proj.weight (16, 9)"
    ]


def test_equal_scalars_agree() -> None:
    assert contract_differences([spec("scale")], [spec("scale")], PACKED) == []


def test_a_part_that_the_engine_would_round_is_a_difference() -> None:
    learner = with_changed(LEARNER, spec("layers.0.attn.v_proj.bias", 4, dtype="bfloat16"))
    engine = with_changed(ENGINE, spec("layers.0.attn.qkv_proj.bias", 16, dtype="bfloat16"))
    assert contract_differences(learner, engine, PACKED) == [
        "layers.0.attn.qkv_proj.bias: learner dtype ['bfloat16', 'float32'], engine dtype bfloat16"
    ]


def test_an_engine_may_hold_bfloat16_in_float32() -> None:
    """vLLM's kernels for CPUs with AMX keep the biases of a bfloat16 model so."""
    learner, engine = ([replace(spec, dtype="bfloat16") for spec in specs] for specs in (LEARNER, ENGINE))
    engine = with_changed(engine, spec("layers.0.attn.qkv_proj.bias", 16, dtype="float32"))
    assert contract_differences(learner, engine, PACKED) == []


def test_all_differences_are_listed_at_once() -> None:
    learner = [*with_changed(LEARNER, spec("norm.weight", 8, dtype="float64"))[1:], spec("extra", 1)]
    assert len(contract_differences(learner, ENGINE, PACKED)) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128},
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 256},
        {"model_type": "ernie4_5_moe", "moe_num_experts": [64, 64]},
        {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"num_local_experts": 16}},
    ],
    ids=lambda settings: settings.get("model_type", "nested"),
)
def test_a_mixture_of_experts_is_refused_by_its_architecture(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_experts(settings, "some/model")
    assert (settings.get("architectures") or [settings["model_type"]])[0] in str(caught.value)
    assert "qwen2, qwen3, llama, mistral" in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"model_type": "qwen3", "num_experts": 0, "num_experts_per_tok": 8}])
def test_a_dense_model_is_not_refused(settings: dict[str, Any]) -> None:
    refuse_experts(settings, "some/model")


def test_a_model_of_images_is_refused_by_its_architecture() -> None:
    settings = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {"depth": 32},
    }
    with pytest.raises(ConfigError, match=r"Qwen2_5_VLForConditionalGeneration is a model of images .* qwen2, qwen3"):
        refuse_images(settings, "Qwen/Qwen2.5-VL-3B-Instruct")
    refuse_images({"model_type": "gemma3", "vision_config": {}}, "also/a-language-model")
    refuse_images({"model_type": "qwen2"}, "a/language-model")


def test_models_of_images_that_are_language_models_too_are_those_that_transformers_loads_as_such() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= ALSO_LANGUAGE_MODELS
    assert "qwen2_5_vl" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
