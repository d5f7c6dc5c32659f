"""The start-up contract: learner and engine must have the same parameters before the first publish.

vLLM fuses projections (q, k and v into one), pads vocabularies and shards tensors. The comparison therefore maps each
engine parameter to the Hugging Face names that fill it, and compares sizes along the fused dimension.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.types import ParameterSpec

if TYPE_CHECKING:
    from hpc_grpo.config import Config

_EXACT_IN = {"float32": ("bfloat16", "float16")}
"""An engine's dtype -> learner dtypes whose values it holds exactly. vLLM's CPU kernels keep biases in float32."""

DENSE_ARCHITECTURES = ("qwen2", "qwen3", "llama", "mistral")
"""Values of `model_type`: dense models that `plan` has formulas for. Tests compare their buffers."""

MIXTURES = ("mixtral", "qwen3_moe")
"""Values of `model_type`: mixtures whose experts are two tensors per layer, in engines and in learners."""

_NEUTRAL = {"final_logit_softcapping": None, "attn_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""Settings that change logits or attention scores in ways that learners do not compute -> their neutral values."""

_NUMBER_OF_EXPERTS = re.compile(r"(moe_)?(num|n)_((local|routed)_)?experts")

ALSO_LANGUAGE_MODELS = frozenset((
    "gemma3", "gemma3n", "gemma4", "gemma4_unified", "git", "got_ocr2", "llama4", "mllama", "qwen3_5", "qwen3_5_moe",
    "qwen4_exp",
))  # fmt: skip
"""Values of `model_type`: models of images that transformers also loads as causal language models."""

VISION_MODELS = ("qwen2_5_vl", "idefics3")
"""Values of `model_type`: models of images and text that train with `data.images`."""


def refuse_images(settings: Mapping[str, Any], path: str, column: str | None) -> None:
    """Raise ConfigError if `data.images` = `column` does not fit a config.json: only model or data has images."""
    kind = settings.get("model_type")
    named = (settings.get("architectures") or [kind])[0]
    if column is not None and kind not in VISION_MODELS:
        raise ConfigError(
            f"data.images = {column} needs a model of images and text: {', '.join(VISION_MODELS)}. model.path = {path} "
            f"is {named}. Use one of these, or set data.images to null."
        )
    if column is None and isinstance(settings.get("vision_config"), Mapping) and kind not in ALSO_LANGUAGE_MODELS:
        instead = "Set data.images to the column with the images" if kind in VISION_MODELS else "Use a model of images "
        instead += "" if kind in VISION_MODELS else f"that trains with data.images: {', '.join(VISION_MODELS)}"
        raise ConfigError(
            f"model.path = {path}: {named} is a model of images and text, and data.images is not set. {instead}. Or "
            f"give a language model of text, such as one of {', '.join(DENSE_ARCHITECTURES)}."
        )


def refuse_experts(settings: Mapping[str, Any], path: str, *, has_adapter: bool = False) -> None:
    """Raise ConfigError if a config.json describes a mixture of experts outside MIXTURES.

    With an adapter, raise it for all mixtures: engines have no adapters for experts.

    This check needs no nodes and no weights. The contract is compared after both sides have loaded the model.
    """
    if settings.get("model_type") in MIXTURES and not has_adapter:
        return
    why = "which lora cannot adapt." if has_adapter else f"and engines support only {', '.join(MIXTURES)}."
    for name, value in settings.items():
        if isinstance(value, Mapping):  # text_config, ffn_config
            refuse_experts({"architectures": settings.get("architectures"), **value}, path, has_adapter=has_adapter)
        elif _NUMBER_OF_EXPERTS.fullmatch(name) and value not in (None, 0, 1):
            named = settings.get("architectures") or [settings.get("model_type", "its architecture")]
            raise ConfigError(
                f"model.path = {path}: {named[0]} is a mixture of experts ({name} = {value}), {why} "
                f"Supported: dense decoders, such as {', '.join(DENSE_ARCHITECTURES)}. task: sft without lora "
                "trains every mixture, because it has no engines."
            )


def refuse_wrong_experts(settings: Mapping[str, Any], path: str, config: Config) -> None:
    """Raise ConfigError if a key of `train` needs experts that the model lacks, or if engines cannot divide them.

    `engine.tensor_parallel` must divide the channels of an expert, and is at most the number of experts.
    """
    kind, train = settings.get("model_type"), config.train
    if kind not in MIXTURES:
        for key, value, off in (
            ("router_aux_loss_coef", train.router_aux_loss_coef, "0"),
            ("router_replay", train.router_replay, "false"),
        ):
            if value:
                raise ConfigError(
                    f"train.{key} = {str(value).lower()} needs a mixture of experts: {', '.join(MIXTURES)}. model.path "
                    f"= {path} is {kind}. Set train.{key}={off}, or use one of these models."
                )
        return
    name, degree = "intermediate_size" if kind == "mixtral" else "moe_intermediate_size", config.engine.tensor_parallel
    channels = settings.get(name, 0)
    most = settings.get("num_local_experts") or settings.get("num_experts") or degree
    if config.needs.rollouts and (channels % degree or degree > most):
        fitting = [str(each) for each in range(1, min(degree, most + 1)) if channels % each == 0]
        raise ConfigError(
            f"engine.tensor_parallel = {degree} must divide {name} = {channels} and be at most the number of experts, "
            f"{most}, of model.path = {path}. Set it to {', '.join(fitting)}."
        )


def refuse_scaled_logits(settings: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if a config.json scales or caps logits, which learners do not compute. `source`: key = value"""
    for name, neutral in _NEUTRAL.items():
        if settings.get(name) not in (neutral, None):
            raise ConfigError(
                f"{source}: learners do not compute {name} = {settings[name]} of its config.json. Use a model without "
                f"it, for example Gemma 3 instead of Gemma 2."
            )


def refuse_uneven_heads(settings: Mapping[str, Any], degree: int, source: str) -> None:
    """Raise ConfigError if `train.sequence_parallel` = `degree` does not divide the heads in a config.json."""
    settings = settings.get("text_config") or settings
    names = ("num_attention_heads", "num_key_value_heads")
    counts = {name: settings[name] for name in names if settings.get(name)}
    if any(count % degree for count in counts.values()):
        common = gcd(*counts.values())
        raise ConfigError(
            f"train.sequence_parallel = {degree} must divide the heads of {source}: "
            f"{', '.join(f'{name} = {count}' for name, count in counts.items())}. Set it to "
            f"{', '.join(str(each) for each in range(1, common + 1) if common % each == 0)}."
        )


def refuse_short_context(limit: int | None, config: Config, source: str) -> None:
    """Raise ConfigError if prompt and completion may exceed `limit`, a model's `max_position_embeddings`."""
    if config.needs.rollouts and limit is not None and config.max_model_len > limit:
        raise ConfigError(
            f"{config.longest_sequence} = {config.data.max_prompt_tokens} + {config.longest_rollout} = "
            f"{config.max_model_len} exceeds the context of {source}: {limit} tokens. Lower one of the two, or use "
            f"another model."
        )


def refuse_long_rope(settings: Mapping[str, Any], config: Config, source: str) -> None:
    """Raise ConfigError if sequences may exceed `original_max_position_embeddings` of a model with `longrope`.

    transformers uses the long factors for all sequences of a row if one of them exceeds this length. vLLM uses the long
    factors for all sequences if `max_model_len` exceeds it.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    first = rope.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    key, longest = "train.max_tokens_per_microbatch", config.train.max_tokens_per_microbatch
    if config.needs.rollouts:
        key, longest = config.longest_sequence, config.max_model_len
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su") and first is not None and longest > first:
        raise ConfigError(
            f"{source} has other rotary frequencies (longrope) in sequences of more than {first} tokens. Learners "
            f"cannot choose them for each sequence of a packed row. {key} = {longest} must be at most {first}. Lower "
            f"it, or use another model."
        )


def contract_differences(
    learner: Sequence[ParameterSpec], engine: Sequence[ParameterSpec], packed_modules: Mapping[str, Sequence[str]]
) -> list[str]:
    """List the differences between the parameters of learner and engine, one per line; [] if they agree.

    `engine` holds unsharded shapes in the engine's own (fused) names. `packed_modules` maps a fused module to its
    modules, in order: {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
    """
    remaining = {spec.name: spec for spec in learner}
    differences = []
    for expected in engine:
        module, _, parameter = expected.name.rpartition(".")
        parent, _, leaf = module.rpartition(".")
        names = [f"{parent}.{part}.{parameter}" for part in packed_modules.get(leaf, ())] or [expected.name]
        missing = [name for name in names if name not in remaining]
        found = [remaining.pop(name) for name in names if name in remaining]
        if missing:
            differences.append(f"{', '.join(missing)}: the engine needs it, the learner does not publish it")
            continue
        shape, *others = (part.shape for part in found)
        if any(other[1:] != shape[1:] for other in others):
            shapes = ", ".join(f"{part.name} {part.shape}" for part in found)
            differences.append(f"{expected.name}: learner shapes do not fit together: {shapes}")
            continue
        if others:  # concatenated along the first dimension
            shape = (sum(part.shape[0] for part in found), *shape[1:])
        if shape != expected.shape:
            differences.append(f"{expected.name}: learner shape {shape}, engine shape {expected.shape}")
        dtypes = {part.dtype for part in found}
        if not dtypes <= {expected.dtype, *_EXACT_IN.get(expected.dtype, ())}:
            differences.append(f"{expected.name}: learner dtype {sorted(dtypes)}, engine dtype {expected.dtype}")
    return differences + [f"{name}: the learner publishes it, the engine has no such parameter" for name in remaining]
