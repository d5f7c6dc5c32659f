"""Streams of a few items, as a driver loads them: written to the files that the config names, in the current folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config
from hpc_grpo.config.train import SftTask
from hpc_grpo.data.loading import Streams, load_streams
from hpc_grpo.data.stream import DemonstrationStream, PromptStream

TOKENIZER_ID = {"tokenizer.json": "of a test"}


def write_items(path: str | Path, items: Sequence[dict[str, Any]]) -> None:
    Path(path).write_text("".join(f"{json.dumps(item)}\n" for item in items))


def loaded(config: Config, tokenizer: Any, seed: int = 0) -> Streams:
    config = config.model_copy(update={"run": config.run.model_copy(update={"seed": seed})})
    return load_streams(config, tokenizer, tokenizer_id=TOKENIZER_ID)


def prompts(config: Config, items: Sequence[dict[str, Any]], tokenizer: Any, seed: int = 0) -> PromptStream:
    """Return the stream of `items`, which are written to `data.train`."""
    write_items(str(config.data.train.path), items)
    stream = loaded(config, tokenizer, seed).train
    assert isinstance(stream, PromptStream)
    return stream


def demonstrations(
    config: Config, items: Sequence[dict[str, Any]], tokenizer: Any, seed: int = 0
) -> DemonstrationStream:
    write_items(str(config.data.train.path), items)
    stream = loaded(config.model_copy(update={"task": SftTask()}), tokenizer, seed).train
    assert isinstance(stream, DemonstrationStream)
    return stream
