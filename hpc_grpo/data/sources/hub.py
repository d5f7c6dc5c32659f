"""Data source: a folder of a saved data set, or a name on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.sources.base import BATCH_ITEMS, Item, Source
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import SOURCES
from hpc_grpo.system.hugging_face import is_no_hub_name

_SAVED_MARKERS = ("dataset_info.json", "dataset_dict.json")


@SOURCES.register("hub")
class Table(Source):
    """A table of the library `datasets`, mapped from the disk."""

    def items(self) -> Iterator[Item]:
        for batch in self._table().iter(batch_size=BATCH_ITEMS):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    def identity(self) -> Mapping[str, str]:
        """Return the contents of a folder; else the library's own fingerprint, in which the revision is."""
        if self.path.exists():
            return {**(super().identity() or {}), "split": self.config.split}
        table = self._table()
        return {self.config.split: f"{len(table)} rows, fingerprint {table._fingerprint}"}

    def files(self) -> list[Path]:
        return [Path(table["filename"]) for table in self._table().cache_files]

    def _table(self) -> Any:
        is_saved = self.path.is_dir() and any((self.path / marker).exists() for marker in _SAVED_MARKERS)
        return _read_saved(self.config) if is_saved else _read_named(self.config)


def _read_saved(config: SourceConfig) -> Any:
    datasets = _datasets_module(config)
    try:
        table = datasets.load_from_disk(config.path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"Data set folder {config.path} cannot be loaded: {error}") from error
    if isinstance(table, datasets.DatasetDict):
        if config.split not in table:
            raise ConfigError(
                f"Data set folder {config.path} has no split {config.split!r}. Splits: {', '.join(table)}."
            )
        table = table[config.split]
    return table


def _read_named(config: SourceConfig) -> Any:
    datasets, place = _datasets_module(config), Path(config.path)
    if is_no_hub_name(config.path) and not place.exists():
        raise ConfigError(
            f"Data set {config.path!r}: there is no {place.absolute()}. Give a path that exists, or a name of the "
            f"Hugging Face hub."
        )
    try:
        return datasets.load_dataset(config.path, config.subset, split=config.split, trust_remote_code=False)
    except Exception as error:
        # The hub raises whatever its HTTP client does; for the user each of these means the same thing.
        subset = "" if config.subset is None else f", subset {config.subset!r}"
        raise ConfigError(
            f"Data set {config.path!r}{subset}, split {config.split!r} cannot be loaded: "
            f"{type(error).__name__}: {error}\nIf the name is right and this machine is offline, fetch it "
            f"once on the login node, with the same HF_HOME as the job:\n"
            f'  python -c "import datasets; datasets.load_dataset({config.path!r}, {config.subset!r}, '
            f'split={config.split!r})"\nIf it was meant as a file, no such file exists.'
        ) from error


def _datasets_module(config: SourceConfig) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"Data set {config.path!r} needs the package `datasets` ({error}). "
            f"Install hpc-grpo[train], or use a .jsonl file."
        ) from error
    return datasets
