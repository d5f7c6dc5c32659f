"""Verifying: load an item as the run will, from the caches alone. Runs in the worker process."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.data.fingerprint import tokenizer_identity
from hpc_grpo.data.loading import load_rows
from hpc_grpo.data.sources import open_source
from hpc_grpo.data.tokenizer import (
    check_context_length,
    load_tokenizer,
    model_folder,
    refuse_other_vocabularies,
    stop_token_ids,
)
from hpc_grpo.errors import ConfigError
from hpc_grpo.preflight.prefetch.items import Item, source_of
from hpc_grpo.system.hugging_face import WEIGHT_FORMS, read_header, weight_files

_NETWORK_EVENTS = ("socket.connect", "socket.getaddrinfo", "socket.sendto")


def shut_off_network() -> None:
    """Fail every connection of this process from now on, as if there were no network. Cannot be undone."""

    def refuse(event: str, _arguments: tuple[object, ...]) -> None:
        if event in _NETWORK_EVENTS:
            raise ConnectionError(f"The network is off while caches are verified ({event}).")

    sys.addaudithook(refuse)


def verify(config: Config, item: Item) -> dict[str, Any]:
    """Load the item with the run's own code; return `folder` and `num_bytes`. Raises ConfigError where it fails."""
    return _verify_model(config, item) if item.key in config.models else _verify_dataset(config, item)


def _verify_model(config: Config, item: Item) -> dict[str, Any]:
    folder = model_folder(item.name)
    if item.key == "model.path":
        tokenizer = load_tokenizer(config)
        check_context_length(config)
        stop_token_ids(config, tokenizer)
    if item.key in config.scoring_models:
        refuse_other_vocabularies(config)
    check_weights(folder)
    files = (file for file in folder.rglob("*") if file.is_file())
    return {"folder": str(folder), "num_bytes": sum(file.stat().st_size for file in files)}


def _verify_dataset(config: Config, item: Item) -> dict[str, Any]:
    """Check and tokenize every row, which leaves it in the cache of tokenized data: the run finds it there."""
    source = source_of(config, item)
    rows = load_rows(config, source, load_tokenizer(config), tokenizer_identity(config, os.environ))
    files = open_source(source).files() or list(rows.folder.iterdir())
    folder = files[0] if len(files) == 1 and item.is_local else files[0].parent
    return {"folder": str(folder), "num_bytes": sum(file.stat().st_size for file in files)}


def check_weights(folder: Path) -> None:
    """Raise ConfigError that names the first file of the weights that is missing or cut short, without loading any."""
    files = weight_files(folder)
    if not files:
        forms = " nor ".join(WEIGHT_FORMS)
        raise ConfigError(f"{folder} has no weights: neither {forms}, whole or in parts. Fetch them too.")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is missing: the index beside it names it. Run prefetch again.")
        if not _is_whole(file):
            raise ConfigError(
                f"{file} ({file.stat().st_size:,} bytes) is cut short or damaged. Delete {file.resolve()} and run "
                f"prefetch again."
            )


def _is_whole(file: Path) -> bool:
    if file.suffix != ".safetensors":
        return zipfile.is_zipfile(file)
    try:
        return read_header(file).file_bytes == file.stat().st_size
    except ConfigError:
        return False
