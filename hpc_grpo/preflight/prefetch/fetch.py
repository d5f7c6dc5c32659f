"""Downloading what one item names. Imports the Hugging Face libraries: they must find the caches in the environment."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Sequence

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch.items import Item, dataset_of

_WEIGHTS = (
    ("model.safetensors.index.json", "model-*.safetensors"),
    ("model.safetensors",),
    ("pytorch_model.bin.index.json", "pytorch_model-*.bin"),
    ("pytorch_model.bin",),
)
"""Forms of weights that transformers finds by itself, the preferred one first. The first name must be there."""

_SETTINGS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "additional_chat_templates/*.jinja")
_NOT_SETTINGS = ("*.index.json", "adapter_*", "*requirements*.txt", "LICENSE*", "*license*.txt")


def fetch(config: Config, item: Item) -> None:
    """Download the item into its cache; what is there already is not fetched again."""
    if item.key == "model.path":
        _fetch_model(item.name)
    else:
        from hpc_grpo.data.sources import load_items

        load_items(dataset_of(config, item))


def needed_files(name: str, files: Sequence[str]) -> list[str]:
    """Those of a model repository's files that training reads: settings, tokenizer and one form of the weights.

    Raises ConfigError when there is no form that transformers can load.

    >>> needed_files("m", ["config.json", "README.md", "model.safetensors", "pytorch_model.bin", "onnx/model.onnx"])
    ['config.json', 'model.safetensors']
    """
    weights = next((patterns for patterns in _WEIGHTS if patterns[0] in files), None)
    if weights is None:
        raise ConfigError(
            f"model.path = {name}: the repository has no weights that training can load ({_WEIGHTS[1][0]} or "
            f"{_WEIGHTS[3][0]}, whole or in parts). Name the repository of the original model, not of a conversion."
        )
    return [file for file in files if _matches(file, weights) or _is_setting(file)]


def _fetch_model(name: str) -> None:
    from huggingface_hub import HfApi, snapshot_download

    files = needed_files(name, HfApi().list_repo_files(name))
    snapshot_download(name, allow_patterns=[glob.escape(file) for file in files])


def _is_setting(file: str) -> bool:
    in_its_place = "/" not in file or file.startswith("additional_chat_templates/")
    return in_its_place and _matches(file, _SETTINGS) and not _matches(file, _NOT_SETTINGS)


def _matches(file: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in patterns)
