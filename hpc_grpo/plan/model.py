"""Shapes of decoders with grouped-query attention and a gated MLP or experts (Llama, Mistral, Qwen2, Qwen3, Mixtral).

A shape comes from a model's folder, without loading the model, or from the Qwen2.5 family. The number of parameters is
exact if the folder has safetensors files, whose headers list every tensor. Otherwise it comes from a formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.system.hugging_face import find_model, read_header, read_settings, weight_files
from hpc_grpo.weights.contract import DENSE_ARCHITECTURES, MIXTURES, refuse_experts

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide memory: channels, layers, heads and vocabulary.

    `has_qkv_bias`: Qwen2, or `attention_bias`; `has_output_bias`: `attention_bias` of Llama and Qwen3;
    `has_query_key_norm`: Qwen3. With experts, `intermediate_size` is that of one.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    has_tied_embeddings: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_query_key_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def active_size(self) -> int:
        """Count the intermediate channels that one token passes through."""
        return self.intermediate_size * (self.experts_per_token or 1)

    @property
    def routed_bytes(self) -> int:
        """Return the bytes that name one token's experts in all layers."""
        return self.num_layers * self.experts_per_token * (1 if self.num_experts <= 256 else 2)

    @property
    def num_idle_parameters(self) -> int:
        """Count the parameters that compute nothing for one token: those of the other experts."""
        idle = self.num_experts - self.experts_per_token
        return self.num_layers * idle * 3 * self.hidden_size * self.intermediate_size

    @property
    def attention_size(self) -> int:
        """Count the channels of all query heads together; the hidden size in most models."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Count the channels of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_layer_parameters(self) -> int:
        """Count a layer's parameters: q, k, v, o; gate, up, down of each expert, a router; norms; biases if any."""
        d, a, k, f = self.hidden_size, self.attention_size, self.kv_size, self.intermediate_size
        matrices = d * (a + 2 * k) + a * d + 3 * d * f * (self.num_experts or 1) + d * self.num_experts
        biases = self.has_qkv_bias * (a + 2 * k) + self.has_output_bias * d + self.has_mlp_bias * (2 * f + d)
        return matrices + biases + 2 * d + self.has_query_key_norm * 2 * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Count all parameters: V d (twice if the output layer is not tied) + L layers + the last norm.

        >>> FAMILY["7B"].num_parameters
        7615616512
        """
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        return embeddings + self.num_layers * self.num_layer_parameters + self.hidden_size

    def adapter_parameters(self, rank: int, targets: str | Sequence[str]) -> int:
        """Count the parameters of a LoRA adapter: rank times inputs and outputs of each adapted layer.

        >>> FAMILY["7B"].adapter_parameters(16, "all-linear")
        40370176
        """
        d, a, k, f = self.hidden_size, self.attention_size, self.kv_size, self.intermediate_size
        sizes = {"q_proj": d + a, "k_proj": d + k, "v_proj": d + k, "o_proj": a + d}
        sizes |= {"gate_proj": d + f, "up_proj": d + f, "down_proj": f + d}
        adapted = [size for name, size in sizes.items() if targets == "all-linear" or name in targets]
        return self.num_layers * rank * sum(adapted)

    @property
    def largest_parameter(self) -> int:
        """Count the elements of the largest parameter: the embedding, or gate and up of all experts in a layer."""
        of_experts = 2 * self.num_experts * self.intermediate_size
        widest = max(self.vocab_size, self.intermediate_size, self.attention_size, of_experts)
        return widest * self.hidden_size


@dataclass(frozen=True)
class Model:
    """A shape with a parameter count. `counted_from` describes the source of the count.

    `teacher_parameters` counts the teacher of a distillation, `reference_parameters` a separate reference model of the
    KL.
    """

    name: str
    shape: ModelShape
    num_parameters: int
    counted_from: str
    teacher_parameters: int = 0
    reference_parameters: int = 0


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool = False) -> ModelShape:
    vocab, head = 151_936 if tied else 152_064, hidden // heads
    return ModelShape(hidden, layers, heads, kv_heads, head, intermediate, vocab, tied, has_qkv_bias=True)


FAMILY: dict[str, ModelShape] = {
    "0.5B": _qwen(896, 24, 14, 2, 4_864, tied=True),
    "1.5B": _qwen(1_536, 28, 12, 2, 8_960, tied=True),
    "3B": _qwen(2_048, 36, 16, 2, 11_008, tied=True),
    "7B": _qwen(3_584, 28, 28, 4, 18_944),
    "14B": _qwen(5_120, 48, 40, 8, 13_824),
    "32B": _qwen(5_120, 64, 40, 8, 27_648),
    "72B": _qwen(8_192, 80, 64, 8, 29_568),
}
"""Qwen2.5's sizes, in ascending order; from the config.json of each."""


def family_model(size: str) -> Model:
    shape = FAMILY[size]
    return Model(f"Qwen2.5-{size}", shape, shape.num_parameters, "built-in shape")


def read_model(path: str, environ: Mapping[str, str], key: str = "model.path") -> Model:
    """Return the model that the config's `key` names. A model that only scores may be any mixture of experts.

    Raises ConfigError if the model is not on this machine, or its kind is unknown.
    """
    try:
        folder = find_model(path, environ, key)
    except ConfigError as error:
        raise ConfigError(
            f"{error} Or plan with a known size: hpc-grpo plan CONFIG --size {' | '.join(FAMILY)}."
        ) from error
    settings = read_settings(folder)
    if key == "model.path":
        refuse_experts(settings, path)
    shape = read_shape(settings, f"{key} = {path}")
    counted = count_parameters(folder, is_tied=shape.has_tied_embeddings)
    if counted is not None:
        return Model(path, shape, counted, "safetensors headers")
    kind = settings.get("model_type")
    known = (*DENSE_ARCHITECTURES, *MIXTURES)
    if kind not in known:
        raise ConfigError(
            f"{key} = {path}: {folder} has no safetensors files to count, and no formula is known for "
            f"model_type = {kind!r} (known: {', '.join(known)}). Fetch the weights too."
        )
    return Model(path, shape, shape.num_parameters, "formula on config.json")


def read_shape(settings: Mapping[str, Any], source: str) -> ModelShape:
    """Return the shape in a config.json. Raises ConfigError for missing sizes. `source`: key = value."""
    settings = {**settings, **(settings.get("text_config") or {})}
    missing = [key for key in _REQUIRED if not isinstance(settings.get(key), int)]
    if missing:
        raise ConfigError(
            f"{source}: its config.json has no {', '.join(missing)}, from which plan computes a decoder's sizes. If "
            "these are the defaults of its class, add them to config.json. Or plan a model of its size: --size."
        )
    kind, heads = settings.get("model_type"), settings["num_attention_heads"]
    num_experts = settings.get("num_local_experts") or settings.get("num_experts") or 0
    has_bias = bool(settings.get("attention_bias", False))
    return ModelShape(
        hidden_size=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        intermediate_size=settings.get("moe_intermediate_size") or settings["intermediate_size"],
        vocab_size=settings["vocab_size"],
        has_tied_embeddings=bool(settings.get("tie_word_embeddings", False)),
        has_qkv_bias=kind == "qwen2" or has_bias,
        has_output_bias=kind != "qwen2" and has_bias,
        has_mlp_bias=bool(settings.get("mlp_bias", False)),
        has_query_key_norm=kind in ("qwen3", "qwen3_moe"),
        num_experts=num_experts,
        experts_per_token=settings.get("num_experts_per_tok", 0) if num_experts else 0,
    )


def count_parameters(folder: Path, *, is_tied: bool) -> int | None:
    """Count the elements of the weights, a tied output layer once. None unless all their safetensors files exist."""
    files = weight_files(folder)
    if not files or not all(file.suffix == ".safetensors" and file.is_file() for file in files):
        return None
    shapes = {name: shape for file in files for name, shape in read_header(file).shapes.items()}
    if is_tied and len(shapes) > 1:
        shapes.pop("lm_head.weight", None)
    return sum(prod(shape) for shape in shapes.values())
