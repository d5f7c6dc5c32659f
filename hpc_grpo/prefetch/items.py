"""What a run reads from the Hugging Face hub or from disk, as its resolved config names it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_grpo.config.schema import Config, DatasetConfig

Key = Literal["model.path", "data.train.path", "data.eval.path"]

_DATA_FILES = (".jsonl", ".json")


@dataclass(frozen=True)
class Item:
    """A model or data set. `key` is where the config names it; one that `is_local` is only verified."""

    key: Key
    name: str
    is_local: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.name}"


def items_of(config: Config) -> list[Item]:
    """The model first: the first row of a data set is tokenized with it. The KL reference is the same model."""
    items = [Item("model.path", config.model.path, _is_local_model(config.model.path))]
    items.append(Item("data.train.path", config.data.train.path, _is_local_dataset(config.data.train)))
    if config.data.eval is not None:
        items.append(Item("data.eval.path", config.data.eval.path, _is_local_dataset(config.data.eval)))
    return items


def dataset_of(config: Config, item: Item) -> DatasetConfig:
    """The section of `config` that describes a data set among its items."""
    dataset = config.data.train if item.key == "data.train.path" else config.data.eval
    assert dataset is not None
    return dataset


def _is_local_model(path: str) -> bool:
    return _is_no_hub_name(path) or Path(path).is_dir()


def _is_local_dataset(dataset: DatasetConfig) -> bool:
    return _is_no_hub_name(dataset.path) or dataset.path.endswith(_DATA_FILES) or Path(dataset.path).exists()


def _is_no_hub_name(path: str) -> bool:
    """Names of the hub are NAME or ORGANISATION/NAME."""
    return path.startswith((".", "/", "~")) or (path.count("/") > 1 and "://" not in path)
