"""The model and the data sets that a run reads, from the Hugging Face hub or from disk, as its config names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_grpo.config import Config, DatasetConfig

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


def items_of(config: Config, working_dir: Path) -> list[Item]:
    """Return the items of a run, the model first: data are tokenized with it. The KL reference is the same model.

    `working_dir` is the folder that the run would read from: one named like ORGANISATION/NAME wins over the hub.
    """
    model, train = config.model.path, config.data.train.path
    items = [Item("model.path", model, _is_local_model(model, working_dir))]
    items.append(Item("data.train.path", train, _is_local_dataset(train, working_dir)))
    if config.data.eval is not None:
        evaluation = config.data.eval.path
        items.append(Item("data.eval.path", evaluation, _is_local_dataset(evaluation, working_dir)))
    return items


def is_there(place: Path) -> bool:
    """Tell whether `place` exists, as far as this user may look."""
    try:
        return place.exists()
    except OSError:  # below a folder this user may not enter, nor may the job
        return False


def dataset_of(config: Config, item: Item) -> DatasetConfig:
    dataset = config.data.train if item.key == "data.train.path" else config.data.eval
    assert dataset is not None
    return dataset


def _is_local_model(path: str, working_dir: Path) -> bool:
    place = working_dir / path
    return _is_no_hub_name(path) or (is_there(place) and place.is_dir())


def _is_local_dataset(path: str, working_dir: Path) -> bool:
    return _is_no_hub_name(path) or path.endswith(_DATA_FILES) or is_there(working_dir / path)


def _is_no_hub_name(path: str) -> bool:
    """Tell a path from a name of the hub, which is NAME or ORGANISATION/NAME."""
    return path.startswith((".", "/", "~")) or (path.count("/") > 1 and "://" not in path)
