"""The model and the data sets that a run reads, from the Hugging Face hub or from disk, as its config names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.registry import names_function
from hpc_grpo.system.hugging_face import is_no_hub_name

DATA_FILES = (".jsonl", ".json", ".parquet", ".arrow")
_MADE_HERE = "reasoning_gym:"


@dataclass(frozen=True)
class Item:
    """A model or data set. `key` is where the config names it, such as data.train.path or data.train.mix.0.path; one
    that `is_local` is only verified.
    """

    key: str
    name: str
    is_local: bool

    def __str__(self) -> str:
        return f"{self.key} = {self.name}"


def items_of(config: Config, working_dir: Path) -> list[Item]:
    """Return the items of a run, the model first: data are tokenized with it.

    `working_dir` is the folder that the run would read from: one named like ORGANISATION/NAME wins over the hub.
    """
    items = [Item(key, name, _is_local_model(name, working_dir)) for key, name in config.models.items()]
    for key, source in [*config.data.sources(for_eval=False), *config.data.sources(for_eval=True)]:
        items.append(Item(f"{key}.path", source.path, _is_local_dataset(source.path, working_dir)))
    return items


def is_there(place: Path) -> bool:
    """Tell whether `place` exists, as far as this user may look."""
    try:
        return place.exists()
    except OSError:  # below a folder this user may not enter, nor may the job
        return False


def source_of(config: Config, item: Item) -> SourceConfig:
    sources = [*config.data.sources(for_eval=False), *config.data.sources(for_eval=True)]
    return next(source for key, source in sources if f"{key}.path" == item.key)


def is_generated(path: str) -> bool:
    """Tell whether a data set is made by a function or a package, and is nowhere until then."""
    return path.startswith(_MADE_HERE) or names_function(path)


def _is_local_model(path: str, working_dir: Path) -> bool:
    place = working_dir / path
    return is_no_hub_name(path) or (is_there(place) and place.is_dir())


def _is_local_dataset(path: str, working_dir: Path) -> bool:
    return is_generated(path) or is_no_hub_name(path) or path.endswith(DATA_FILES) or is_there(working_dir / path)
