"""Fingerprints of what a run reads: data, tokenizer and weights of the model, the user's functions.

Contents, and no times: a file that was copied or restored is the same file. Files that the run reads whole at every
start anyway, such as data, are hashed whole. Of a larger file of the model or of a saved data set, of which only
learners read all, 64 blocks spread over it are hashed, with its size: other weights differ everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from hpc_grpo.config import Config, DatasetConfig
from hpc_grpo.data.hugging_face import find_model, weight_files
from hpc_grpo.run.source import functions_of, imported_files, used_file

_WHOLE_BYTES = 1 << 26
_NUM_BLOCKS, _BLOCK_BYTES = 64, 1 << 16

_LEFT_BY_DATASETS = ("cache-", "tmp")
"""Beginnings of names of files that the library `datasets` leaves in a saved data set that somebody else works with."""

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


def fingerprints(config: Config, folder: Path) -> dict[str, dict[str, str]]:
    """Return the fingerprints of all that the run reads; relative paths are relative to `folder`."""
    found = local_fingerprints(config, folder)
    for key, dataset in _datasets(config):
        if key not in found:
            found[key] = _of_named(dataset)
    found["model.path"] = _of_model(find_model(config.model.path, os.environ))
    return found


def local_fingerprints(config: Config, folder: Path) -> dict[str, dict[str, str]]:
    """Return those that a login node can tell at once: of local data and of the user's functions."""
    found = {}
    for key, dataset in _datasets(config):
        if (path := folder / dataset.path).exists():
            found[key] = _of_files(path, whole=path.is_file())
    for key, name in functions_of(config).items():
        if (file := used_file(name, folder)) is not None:
            parts = imported_files(file)
            found[key] = {str(part.relative_to(file.parent)): _of_file(part, whole=True) for part in parts}
    return found


def _datasets(config: Config) -> Iterator[tuple[str, DatasetConfig]]:
    yield "data.train.path", config.data.train
    if config.data.eval is not None and config.eval.every_steps is not None:
        yield "data.eval.path", config.data.eval


def _of_named(dataset: DatasetConfig) -> dict[str, str]:
    """Return the library's own fingerprint, in which the revision is, and the number of rows."""
    import datasets

    table = datasets.load_dataset(dataset.path, dataset.subset, split=dataset.split, trust_remote_code=False)
    return {dataset.split: f"{len(table)} rows, fingerprint {table._fingerprint}"}


def _of_model(folder: Path) -> dict[str, str]:
    files = {file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()}
    found = {file.name: _of_file(file, whole=False) for file in files}
    return found | {file.name: _of_file(file, whole=False) for file in weight_files(folder) if file.is_file()}


def _of_files(path: Path, whole: bool) -> dict[str, str]:
    if path.is_file():
        return {path.name: _of_file(path, whole)}
    names = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    return {str(name): _of_file(path / name, whole) for name in names if not _is_left_over(name)}


def _is_left_over(name: Path) -> bool:
    """Tell whether a file of a data set's folder is a tool's own, which nobody reads as data."""
    return name.name.startswith(_LEFT_BY_DATASETS) or any(part.startswith(".") for part in name.parts)


def _of_file(path: Path, whole: bool) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        if whole or size <= _WHOLE_BYTES:
            return f"{size} bytes, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
        sampled = hashlib.sha256()
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            sampled.update(file.read(_BLOCK_BYTES))
    return f"{size} bytes, sha256 of {_NUM_BLOCKS} blocks {sampled.hexdigest()[:16]}"
