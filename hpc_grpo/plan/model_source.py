"""Reading a model's shape and its number of parameters from its folder, without loading it.

The count is exact where the folder holds safetensors files: their headers list every tensor's shape. Otherwise
the formula of shapes.py counts from config.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.plan.shapes import FAMILY, Model, ModelShape

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_BY_FORMULA = ("qwen2", "qwen3", "llama", "mistral")
_SINGLE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000


def read_model(path: str, environ: Mapping[str, str]) -> Model:
    """The model of `model.path`: a folder, or a name in the Hugging Face cache that `environ` points to.

    Raises ConfigError when it is not on this machine, or is no dense decoder that the formulas describe.
    """
    folder = find_folder(path, environ)
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


def find_folder(path: str, environ: Mapping[str, str]) -> Path:
    """The folder with the model's config.json. Raises ConfigError that says where it was looked for."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ConfigError(f"model.path = {path}: the folder has no config.json. Give the folder of a model.")
    cache = hub_cache(environ)
    snapshot = _snapshot(cache / f"models--{path.replace('/', '--')}")
    if snapshot is not None:
        return snapshot
    raise ConfigError(
        f"model.path = {path} is not on this machine: there is no such folder, and no such name in the Hugging Face "
        f"cache {cache}. Give the folder of a model, fetch it first (hf download {path}), or plan with the shape of "
        f"a known size: --size {' | '.join(FAMILY)}."
    )


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models: $HF_HUB_CACHE, $HF_HOME/hub, or its default."""
    if named := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home).expanduser() / "hub"


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
    """Elements of all tensors in the folder's safetensors files; None unless every file is there.

    A tied output layer is one parameter with the embedding, also where a file stores it twice.
    """
    files = _weight_files(folder)
    if not files or not all(file.is_file() for file in files):
        return None
    shapes = {name: shape for file in files for name, shape in _tensor_shapes(file)}
    if is_tied and len(shapes) > 1:
        shapes.pop("lm_head.weight", None)
    return sum(prod(shape) for shape in shapes.values())


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(_read_json(index).get("weight_map", {}).values()))]
    single = folder / _SINGLE_FILE
    return [single] if single.is_file() else []


def _tensor_shapes(file: Path) -> Iterator[tuple[str, list[int]]]:
    """Name and shape of every tensor. A file starts with the header's length (8 bytes, little-endian) and JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        tensors = json.loads(header)
    except ValueError as error:
        raise ConfigError(f"{file} is no safetensors file: its header cannot be read. Fetch it again.") from error
    for name, entry in tensors.items():
        if name != "__metadata__":
            yield name, entry["shape"]


def _snapshot(repository: Path) -> Path | None:
    """The cached snapshot of a repository: of its main branch, else the newest with a config.json."""
    main = repository / "refs" / "main"
    if main.is_file():
        snapshot = repository / "snapshots" / main.read_text().strip()
        if (snapshot / "config.json").is_file():
            return snapshot
    found = [config.parent for config in repository.glob("snapshots/*/config.json")]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object.")
    return values
