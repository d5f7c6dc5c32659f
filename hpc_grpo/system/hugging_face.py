"""Hugging Face's files on this disk: its caches, models in them, and the headers of their weights.

Imports no library of Hugging Face. A login node may have none, and these libraries read the environment only at import.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_grpo.errors import ConfigError

WEIGHT_FORMS = ("model.safetensors", "pytorch_model.bin")
"""Weight files that transformers loads, the preferred one first. NAME.index.json lists the parts of a split file."""

OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class WeightsHeader:
    """The header of a safetensors file: each tensor's shape by name, and the expected size of the file."""

    shapes: Mapping[str, tuple[int, ...]]
    file_bytes: int


def is_offline(environ: Mapping[str, str]) -> bool:
    """Return whether a variable of `environ` keeps the libraries off the network."""
    return any(environ.get(name, "").lower() in ("1", "on", "yes", "true") for name in OFFLINE_VARIABLES)


def home(environ: Mapping[str, str]) -> Path:
    """Return the folder of caches and tokens: $HF_HOME, or its default.

    >>> str(home({"XDG_CACHE_HOME": "/c"}))
    '/c/huggingface'
    """
    caches = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or '~'}/.cache"
    return Path(environ.get("HF_HOME") or f"{caches}/huggingface").expanduser()


def hub_cache(environ: Mapping[str, str]) -> Path:
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named).expanduser() if named else home(environ) / "hub"


def datasets_cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HF_DATASETS_CACHE") or home(environ) / "datasets").expanduser()


def dataset_folders(name: str, environ: Mapping[str, str]) -> tuple[Path, Path]:
    """Return the folders of a data set from the hub: prepared tables, and downloaded files.

    >>> [str(path) for path in dataset_folders("openai/gsm8k", {"HF_HOME": "/c"})]
    ['/c/datasets/openai___gsm8k', '/c/hub/datasets--openai--gsm8k']
    """
    prepared = datasets_cache(environ) / name.replace("/", "___").lower()
    return prepared, hub_cache(environ) / f"datasets--{name.replace('/', '--')}"


def is_no_hub_name(path: str) -> bool:
    """Return whether a path is no hub name. Hub names are NAME or ORGANISATION/NAME."""
    return path.startswith((".", "/", "~")) or (path.count("/") > 1 and "://" not in path)


def refuse_missing_folder(path: str, key: str) -> None:
    """Raise ConfigError for a model path that is not a hub name, if the folder does not exist."""
    folder = Path(os.path.expanduser(path))
    if is_no_hub_name(path) and not folder.is_dir():
        raise ConfigError(
            f"{key} = {path}: there is no folder {folder.absolute()}. Give the folder of a model, or a name of the "
            f"Hugging Face hub, such as Qwen/Qwen2.5-0.5B-Instruct."
        )


def find_model(path: str, environ: Mapping[str, str] = os.environ, key: str = "model.path") -> Path:
    """Return the model's folder: `path` itself, or its snapshot in the cache of `environ`.

    Uses the snapshot of the main branch, else the newest. Raises ConfigError with the config's `key`.
    """
    folder = Path(os.path.expanduser(path))
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ConfigError(f"{key} = {path}: the folder has no config.json. Give the folder of a model.")
    cache = hub_cache(environ)
    repository = cache / f"models--{path.replace('/', '--')}"
    main = repository / "refs" / "main"
    snapshots = {config.parent.name: config.parent for config in repository.glob("snapshots/*/config.json")}
    if main.is_file() and (snapshot := snapshots.get(main.read_text().strip())):
        return snapshot
    if snapshots:
        return max(snapshots.values(), key=lambda folder: folder.stat().st_mtime)
    refuse_missing_folder(path, key)
    raise ConfigError(
        f"{key} = {path} is not on this machine: there is no such folder, and no such name in the Hugging Face "
        f"cache {cache}. Give the folder of a model, or fetch it first (hf download {path})."
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the model's weight files, also missing ones of an index. Raises ConfigError for a damaged index."""
    for name in WEIGHT_FORMS:
        if (folder / name).is_file():  # transformers prefers it to an index
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                parts = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{index} is no index of weights: {error!r}. Fetch it again.") from error
            return [folder / part for part in parts]
    return []


def check_weights(folder: Path, *, is_local: bool) -> None:
    """Raise ConfigError for the first weight file that is missing or truncated. Loads no weights.

    `is_local`: the folder is the user's own, and prefetch does not download it.
    """
    again = "Run hpc-grpo cluster prefetch CONFIG without --verify-only."
    if is_local:
        again = "Copy the original model's files into the folder (in a clone of git: git lfs pull)."
    files = weight_files(folder)
    if not files:
        raise ConfigError(f"{folder} has no weights: neither {' nor '.join(WEIGHT_FORMS)}, whole or in parts. {again}")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is missing: the index beside it names it. {again}")
        if not _is_whole(file):
            again = again if is_local else f"Delete {file.resolve()}. {again}"
            raise ConfigError(
                f"{file} ({file.stat().st_size:,} bytes) is cut short or damaged, or you may not read it. {again}"
            )


def _is_whole(file: Path) -> bool:
    try:
        if file.suffix == ".safetensors":
            return read_header(file).file_bytes == file.stat().st_size
        with file.open("rb") as stream:  # torch before 1.6 wrote a pickle, which begins with \x80
            return stream.read(1) == b"\x80" or zipfile.is_zipfile(stream)
    except (ConfigError, OSError):
        return False


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the values of a model's config.json. Raises ConfigError if it does not describe a model."""
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(settings, dict) or "model_type" not in settings:
        raise ConfigError(f"{file} must hold a JSON object with model_type. Copy the original model's file.")
    return settings


def read_header(file: Path) -> WeightsHeader:
    """Read a safetensors file's header and no tensors. Raises ConfigError if it is damaged."""
    with file.open("rb") as stream:  # The file starts with the header's length, 8 bytes, little-endian, then JSON.
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length) if length <= _MAX_HEADER_BYTES else b""
    try:
        entries: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file} is no safetensors file: its header cannot be read. Fetch it again.") from error
    entries.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    return WeightsHeader({name: tuple(entry["shape"]) for name, entry in entries.items()}, 8 + length + end)


def linear_layers(folder: Path) -> set[str]:
    """Return the names of a model's linear layers, without embeddings and output layer, from its files' headers.

    Empty if the weights are not safetensors files.
    """
    files = [file for file in weight_files(folder) if file.suffix == ".safetensors" and file.is_file()]
    shapes = {name: shape for file in files for name, shape in read_header(file).shapes.items()}
    layers = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    return {name for name in layers if "embed" not in name and not name.endswith(("lm_head", "wte", "wpe"))}
