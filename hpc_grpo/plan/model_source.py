"""Reading a model's shape and its number of parameters from its folder, without loading it.

The count is exact where the folder holds safetensors files: their headers list every tensor's shape. Otherwise
the formula of shapes.py counts from config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from hpc_grpo.data.hugging_face import find_model, read_header, weight_files
from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.shapes import FAMILY, Model, ModelShape

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_BY_FORMULA = ("qwen2", "qwen3", "llama", "mistral")


def read_model(path: str, environ: Mapping[str, str]) -> Model:
    """The model of `model.path`: a folder, or a name in the Hugging Face cache that `environ` points to.

    Raises ConfigError when it is not on this machine, or is no dense decoder that the formulas describe.
    """
    try:
        folder = find_model(path, environ)
    except ConfigError as error:
        raise ConfigError(f"{error} Or plan with the shape of a known size: --size {' | '.join(FAMILY)}.") from error
    settings = _read_json(folder / "config.json")
    shape = read_shape(settings, path)
    counted = count_parameters(folder, is_tied=shape.has_tied_embeddings)
    if counted is not None:
        return Model(path, shape, counted, "safetensors headers")
    kind = settings.get("model_type")
    if kind not in _BY_FORMULA:
        raise ConfigError(
            f"model.path = {path}: {folder} has no safetensors files to count, and no formula is known for "
            f"model_type = {kind!r} (known: {', '.join(_BY_FORMULA)}). Fetch the weights too."
        )
    return Model(path, shape, shape.num_parameters, "formula on config.json")


def read_shape(settings: Mapping[str, Any], path: str) -> ModelShape:
    """The shape a config.json describes. Raises ConfigError for a mixture of experts and for missing sizes."""
    experts = [key for key in ("num_experts", "num_local_experts", "n_routed_experts") if settings.get(key)]
    missing = [key for key in _REQUIRED if not isinstance(settings.get(key), int)]
    if experts or missing:
        why = f"{experts[0]} = {settings[experts[0]]}" if experts else f"its config.json has no {', '.join(missing)}"
        raise ConfigError(f"model.path = {path}: plan knows dense decoder models only ({why}).")
    kind, heads = settings.get("model_type"), settings["num_attention_heads"]
    has_bias = bool(settings.get("attention_bias", False))
    return ModelShape(
        hidden_size=settings["hidden_size"],
        num_layers=settings["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or settings["hidden_size"] // heads,
        intermediate_size=settings["intermediate_size"],
        vocab_size=settings["vocab_size"],
        has_tied_embeddings=bool(settings.get("tie_word_embeddings", False)),
        has_qkv_bias=kind == "qwen2" or has_bias,
        has_output_bias=kind != "qwen2" and has_bias,
        has_mlp_bias=bool(settings.get("mlp_bias", False)),
        has_query_key_norm=kind == "qwen3",
    )


def count_parameters(folder: Path, *, is_tied: bool) -> int | None:
    """Return the elements of all tensors in the folder's safetensors files; None unless every file is there.

    A tied output layer is one parameter with the embedding, also where a file stores it twice.
    """
    files = weight_files(folder)
    if not files or not all(file.suffix == ".safetensors" and file.is_file() for file in files):
        return None
    shapes = {name: shape for file in files for name, shape in read_header(file).shapes.items()}
    if is_tied and len(shapes) > 1:
        shapes.pop("lm_head.weight", None)
    return sum(prod(shape) for shape in shapes.values())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return values
