"""Fingerprints of a run's inputs: data, chat templates, tokenizer and weights of models, the user's functions.

Hashes a data file completely. Hashes 64 blocks and the size of a large file of the model or of a saved data set: only
learners read these completely, and different weights differ everywhere. The items of a function have a digest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.data.sources import of_file, of_files, open_source
from hpc_grpo.run.source import functions_of, imported_files, used_file
from hpc_grpo.system.hugging_face import find_model, weight_files

_TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "tokenization_*.py",
)


def fingerprints(config: Config, folder: Path, item_digests: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return the fingerprints of all inputs of the run; relative paths are relative to `folder`.

    `item_digests` maps the config key of each source that is no file to the digest of its items.
    """
    found = local_fingerprints(config, folder)
    for key, source in _sources(config):
        if (folder / source.path).exists():
            continue
        if ":" in source.path:
            # In addition to the function's file, which is all that a login node compares: it does not make the items.
            found[f"{key}.items"] = {"sha256": item_digests[key]}
        else:
            # The library's own fingerprint, which includes the revision.
            found[f"{key}.path"] = dict(open_source(source).identity() or {})
    for key, path in config.models.items():
        model = find_model(path, os.environ, key)
        files = _tokenizer_files(model) | {file for file in weight_files(model) if file.is_file()}
        found[key] = {file.name: of_file(file, whole=False) for file in files}
    return found


def local_fingerprints(config: Config, folder: Path) -> dict[str, dict[str, str]]:
    """Return the fingerprints that are quick to compute: local data, chat templates, the user's functions."""
    found = {}
    for key, source in _sources(config):
        if (path := folder / source.path).exists():
            found[f"{key}.path"] = of_files(path, whole=path.is_file())
    for key, name in config.data.chat_templates.items():
        if (template := folder / name).is_file():
            found[key] = of_files(template, whole=True)
    for key, name in functions_of(config).items():
        if (file := used_file(name, folder)) is not None:
            parts = imported_files(file)
            found[key] = {str(part.relative_to(file.parent)): of_file(part, whole=True) for part in parts}
    return found


def tokenizer_identity(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what decides token ids: the tokenizer's files, and the versions of the libraries that read them."""
    versions = {name: metadata.version(name) for name in ("transformers", "tokenizers")}
    folder = find_model(config.model.path, environ)
    files = _tokenizer_files(folder)
    if config.data.images is not None:
        versions["pillow"] = metadata.version("pillow")
        files |= set(folder.glob("*processor_config.json"))
    return versions | {file.name: of_file(file, whole=True) for file in files}


def _sources(config: Config) -> list[tuple[str, SourceConfig]]:
    return config.data.sources(for_eval=None if config.reads_eval_data else False)


def _tokenizer_files(folder: Path) -> set[Path]:
    return {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
