from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.contract import (
    ALSO_LANGUAGE_MODELS,
    contract_differences,
    refuse_experts,
    refuse_images,
    refuse_long_rope,
    refuse_scaled_logits,
)
from tests.support.configs import minimal_config

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


def changed(specs: list[ParameterSpec], changes: list[ParameterSpec | str]) -> list[ParameterSpec]:
    """Put specs in the place of those of their names, or at the end; leave out a name."""
    found = {spec.name: spec for spec in specs}
    for change in changes:
        if isinstance(change, str):
            del found[change]
        else:
            found[change.name] = change
    return list(found.values())


LACKS = "the engine needs it, the learner does not publish it"
UNKNOWN = "the learner publishes it, the engine has no such parameter"
UP, QKV_BIAS, K_BIAS = "layers.0.mlp.up_proj.weight", "layers.0.attn.qkv_proj.bias", "layers.0.attn.k_proj.bias"
GATE_UP, GATE = "layers.0.mlp.gate_up_proj.weight", "layers.0.mlp.gate_proj.weight"
CASES: dict[str, tuple[list[ParameterSpec | str], list[ParameterSpec | str], list[str]]] = {
    "fused layers agree with their parts": ([], [], []),
    "equal scalars": ([spec("scale")], [spec("scale")], []),
    "a missing parameter": (["norm.weight"], [], [f"norm.weight: {LACKS}"]),
    "a missing part of a fused layer": ([K_BIAS], [], [f"{K_BIAS}: {LACKS}"]),
    "one that the engine lacks": ([spec("lm_head.weight", 9, 8)], [], [f"lm_head.weight: {UNKNOWN}"]),
    "a shape": ([], [spec("norm.weight", 9)], ["norm.weight: learner shape (8,), engine shape (9,)"]),
    "a fused size": ([spec(UP, 17, 8)], [], [f"{GATE_UP}: learner shape (33, 8), engine shape (32, 8)"]),
    "parts that do not fit side by side": (
        [spec(UP, 16, 9)],
        [],
        [f"{GATE_UP}: learner shapes do not fit together: {GATE} (16, 8), {UP} (16, 9)"],
    ),
    "a part that the engine would round": (
        [spec("layers.0.attn.v_proj.bias", 4, dtype="bfloat16")],
        [spec(QKV_BIAS, 16, dtype="bfloat16")],
        [f"{QKV_BIAS}: learner dtype ['bfloat16', 'float32'], engine dtype bfloat16"],
    ),
    "all of them": (
        ["model.embed_tokens.weight", spec("norm.weight", 8, dtype="float64"), spec("extra", 1)],
        [],
        [
            f"model.embed_tokens.weight: {LACKS}",
            "norm.weight: learner dtype ['float64'], engine dtype float32",
            f"extra: {UNKNOWN}",
        ],
    ),
}


@pytest.mark.parametrize(("of_learner", "of_engine", "expected"), CASES.values(), ids=CASES)
def test_every_difference_between_learner_and_engine_is_named(
    of_learner: list[ParameterSpec | str], of_engine: list[ParameterSpec | str], expected: list[str]
) -> None:
    assert contract_differences(changed(LEARNER, of_learner), changed(ENGINE, of_engine), PACKED) == expected


def test_an_engine_may_hold_bfloat16_in_float32() -> None:
    """vLLM's kernels for CPUs with AMX keep the biases of a bfloat16 model so."""
    learner, engine = ([replace(spec, dtype="bfloat16") for spec in specs] for specs in (LEARNER, ENGINE))
    assert contract_differences(learner, changed(engine, [spec(QKV_BIAS, 16)]), PACKED) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "olmoe", "architectures": ["OlmoeForCausalLM"], "num_experts": 64},
        {"model_type": "phimoe", "architectures": ["PhimoeForCausalLM"], "num_local_experts": 16},
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


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"model_type": "qwen3", "num_experts": 0, "num_experts_per_tok": 8},
        {"model_type": "qwen3_moe", "num_experts": 128},
        {"model_type": "mixtral", "num_local_experts": 8},
    ],
)
def test_a_dense_model_or_a_known_mixture_is_not_refused(settings: dict[str, Any]) -> None:
    refuse_experts(settings, "some/model")


@pytest.mark.parametrize("settings", [{"attn_logit_softcapping": 50.0}, {"logits_scaling": 8.0}], ids=str)
def test_a_model_that_changes_its_logits_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"some/model: learners do not compute \w+ = [58]"):
        refuse_scaled_logits(settings, "model.path = some/model")
    refuse_scaled_logits({"attn_logit_softcapping": None, "logits_scaling": 1.0}, "model.path = some/model")


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 700},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 700}},
    ],
    ids=str,
)
def test_sequences_beyond_the_first_range_of_a_longrope_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"more than 700 tokens.* data.max_prompt_tokens \+ .* = 768 must be at most"):
        refuse_long_rope(settings, minimal_config(), "model.path = some/model")
    refuse_long_rope(settings, minimal_config(rollout={"max_new_tokens": 188}), "model.path = some/model")
    with pytest.raises(ConfigError, match=r"train.max_tokens_per_microbatch = \d+ must be at most 700"):
        refuse_long_rope(settings, minimal_config(task="sft"), "model.path = some/model")
    refuse_long_rope({"rope_parameters": {"rope_type": "llama3"}}, minimal_config(), "model.path = some/model")


def test_a_model_of_images_is_refused_by_its_architecture() -> None:
    settings = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "vision_config": {"depth": 32},
    }
    with pytest.raises(
        ConfigError, match=r"Qwen2_5_VLForConditionalGeneration is a model of images .* Set data\.images"
    ):
        refuse_images(settings, "Qwen/Qwen2.5-VL-3B-Instruct", None)
    with pytest.raises(
        ConfigError, match=r"LlavaForConditionalGeneration .* with data\.images: qwen2_5_vl, idefics3\. .* qwen2, qwen3"
    ):
        refuse_images({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "llava", None)
    with pytest.raises(ConfigError, match=r"data\.images = image needs .* qwen2_5_vl, idefics3\. .* is qwen2"):
        refuse_images({"model_type": "qwen2"}, "a/language-model", "image")
    refuse_images(settings, "Qwen/Qwen2.5-VL-3B-Instruct", "image")
    refuse_images({"model_type": "gemma3", "vision_config": {}}, "also/a-language-model", None)
    refuse_images({"model_type": "qwen2"}, "a/language-model", None)


def test_models_of_images_that_are_language_models_too_are_those_that_transformers_loads_as_such() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= ALSO_LANGUAGE_MODELS
    assert "qwen2_5_vl" not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
