"""Data sources: a class for each file suffix, for names on the hub, and for the user's functions.

A source turns a `SourceConfig` into items, dicts of columns, in an order that never changes.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_grpo.config import SourceConfig
from hpc_grpo.errors import ConfigError, HpcGrpoError, described
from hpc_grpo.registry import SOURCES, names_function
from hpc_grpo.system.hugging_face import is_no_hub_name

Item = dict[str, Any]
"""The columns of one row. Values are JSON's, or dates, decimals and NumPy arrays, which the encoder converts."""

BATCH_ITEMS = 1000
"""Items read or tokenized in one call: enough for the libraries' threads, few enough to stay small in memory."""

_TAKE_ARGS = ("function", "reasoning_gym")
_IN_FOLDERS = (
    *(".parquet", ".arrow", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt"),
    *(".xml", ".h5", ".hdf5", ".lance", ".tar", ".zip", ".geoparquet", ".gpq", ".conll", ".conllu", ".eval", ".vortex"),
    *(".tsfile", ".toml"),
)
"""Suffixes of files with rows that the library `datasets` finds in a folder. `.json.gz` counts as `.json`."""
_SAVED = ("dataset_info.json", "dataset_dict.json")
"""Files of `save_to_disk`, one of which every saved folder has."""
_WHOLE_BYTES = 1 << 26
_NUM_BLOCKS, _BLOCK_BYTES = 64, 1 << 16
_LEFT_BY_DATASETS = ("cache-", "tmp")
"""Prefixes of files that `datasets` leaves in a saved data set while another process works with it."""


def open_source(config: SourceConfig) -> Source:
    """Return the source. Raises ConfigError for a file type without a reader, and for args if the source takes none."""
    kind = _kind(config.path)
    if config.args and kind not in _TAKE_ARGS:
        raise ConfigError(
            f"Data set {config.path}: args are for a function or a task of reasoning_gym, and this is neither. Remove "
            f"them."
        )
    if config.split != "train" and kind != "hub":
        raise ConfigError(
            f"Data set {config.path}: only a folder or a name of the hub has splits. Leave split = {config.split} out, "
            f"and give the file of that split."
        )
    source: Source = SOURCES.find(kind)(config)
    return source


def read_items(config: SourceConfig) -> Iterator[Item]:
    """Yield the items of a source, at most `max_items`. Raises ConfigError if it cannot be read."""
    return islice(open_source(config).items(), config.max_items)


def _kind(path: str) -> str:
    prefix, separator, _ = path.partition(":")
    if separator and prefix in SOURCES.names():
        return prefix
    if names_function(path):
        return "function"
    suffixes = [name for name in SOURCES.names() if name not in (*_TAKE_ARGS, "hub")]
    suffix = Path(path).suffix
    if suffix[1:] in suffixes and not Path(path).is_dir():
        return suffix[1:]
    if Path(path).is_file():
        raise ConfigError(
            f"Data set {path}: files must end in {', '.join(f'.{name}' for name in suffixes)}, not "
            f"{suffix or 'nothing'!r}. Convert it, put it into a folder, or read it by path/to/file.py:function."
        )
    if Path(path).is_dir() and not _holds_rows(Path(path)):
        raise ConfigError(
            f"Data set {path}: the folder must hold a file that ends in {', '.join(_IN_FOLDERS)}, and holds none. Give "
            f"the folder of a data set, a file, or a name of the Hugging Face hub."
        )
    return "hub"


def _holds_rows(folder: Path) -> bool:
    """Return whether `datasets` could find rows in a folder, by the names of its files. Reads no file."""
    if any((folder / name).exists() for name in _SAVED):
        return True
    names = (name for _, _, files in os.walk(folder, followlinks=True) for name in files if name != "config.json")
    return any(suffix.lower() in _IN_FOLDERS for name in names for suffix in Path(name).suffixes)


def _loaded(text: str, where: str) -> Any:
    """Read JSON. Raises JSONDecodeError, and ConfigError for valid JSON that Python refuses."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: a number has more than 4300 digits, or brackets are nested too deeply. Make it text, or leave "
            f"the item out."
        ) from error


def of_files(path: Path, whole: bool) -> dict[str, str]:
    """Return the fingerprint of a file, or of each file below a folder, by name. Skips hidden and temporary files."""
    if path.is_file():
        return {path.name: of_file(path, whole)}
    names = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    kept = [
        name
        for name in names
        if not name.name.startswith(_LEFT_BY_DATASETS) and not any(part.startswith(".") for part in name.parts)
    ]
    return {str(name): of_file(path / name, whole) for name in kept}


def of_file(path: Path, whole: bool) -> str:
    """Return a file's size and the hash of its contents. Without `whole`, a large file's hash is of 64 blocks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if whole or size <= _WHOLE_BYTES:
            return f"{size} bytes, sha256 {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}"
        sampled = hashlib.sha256()
        for number in range(_NUM_BLOCKS):
            file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
            sampled.update(file.read(_BLOCK_BYTES))
    return f"{size} bytes, sha256 of {_NUM_BLOCKS} blocks {sampled.hexdigest()[:16]}"


class Source(ABC):
    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.path = Path(config.path)

    @abstractmethod
    def items(self) -> Iterator[Item]:
        """Yield all items. Raises ConfigError if they cannot be read."""

    def identity(self) -> Mapping[str, str] | None:
        """Return a value that changes if the items change; None if only reading them shows it. Raises ConfigError."""
        self.check_readable()
        return of_files(self.path, whole=True)

    def files(self) -> list[Path]:
        """Return the files that hold the items; [] for a source that makes its items."""
        return [self.path] if self.path.exists() else []

    def check_readable(self) -> None:
        try:
            if self.path.is_file():
                self.path.open("rb").close()
            else:
                self.path.stat()
        except OSError as error:
            raise ConfigError(
                f"Data set {self.path} cannot be read ({error.strerror}; looked at {self.path.absolute()}). "
                f"Check data.train.path and data.eval.path."
            ) from error

    @contextmanager
    def reading(self, kind: str) -> Iterator[None]:
        """Turn errors of pyarrow in the block into ConfigError."""
        from pyarrow import ArrowException

        self.check_readable()
        try:
            yield
        except (ArrowException, OSError) as error:
            raise ConfigError(f"{self.path} cannot be read as {kind}: {error}") from error


@SOURCES.register("jsonl")
class JsonLines(Source):
    """One JSON object a line. Blank lines are skipped. Needs memory for one line at a time."""

    def items(self) -> Iterator[Item]:
        self.check_readable()
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield self._parsed(number, offset, line)
                offset += len(line)

    def _parsed(self, number: int, offset: int, line: bytes) -> Item:
        """Return the object of a line. `offset` is the position of the line's first byte in the file."""
        where = f"{self.path}, line {number}, byte"
        try:
            text = line.decode("utf-8-sig" if offset == 0 else "utf-8")
            value = _loaded(text, f"{where} {offset}")
        except UnicodeDecodeError as error:
            at = offset + error.start
            raise ConfigError(f"{where} {at}: not valid UTF-8 ({error.reason}). Save the file as UTF-8.") from error
        except json.JSONDecodeError as error:
            at = offset + len(line) - len(text[error.pos :].encode())
            shown = f"{text.strip()[:80]!r}" + ("…" if len(text.strip()) > 80 else ".")
            raise ConfigError(
                f"{where} {at}: not valid JSON ({error.msg}). Every line must be one JSON object; the line reads "
                f"{shown}"
            ) from error
        if not isinstance(value, dict):
            array = " The name of a file with an array of objects must end in .json." if isinstance(value, list) else ""
            raise ConfigError(
                f'{where} {offset}: must be a JSON object such as {{"question": "…", "answer": "…"}}, not '
                f"{type(value).__name__}.{array}"
            )
        return value


@SOURCES.register("json")
class JsonArray(Source):
    """A JSON array of objects. Read at once; for many items, .jsonl needs less memory."""

    def items(self) -> Iterator[Item]:
        self.check_readable()
        path = self.path
        try:
            values = _loaded(path.read_bytes().decode("utf-8-sig"), str(path))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}, byte {error.start}: not valid UTF-8 ({error.reason}).") from error
        except json.JSONDecodeError as error:
            fix = " If it holds one object per line, name it .jsonl." if error.msg == "Extra data" else ""
            raise ConfigError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).{fix}") from error
        if not isinstance(values, list):
            raise ConfigError(f"{path}: must hold a JSON array of objects, not {type(values).__name__}.")
        for number, value in enumerate(values):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}, item {number}: must be a JSON object, not {type(value).__name__}.")
        yield from values


@SOURCES.register("parquet")
class Parquet(Source):
    def items(self) -> Iterator[Item]:
        from pyarrow.parquet import ParquetFile

        with self.reading("Parquet"), ParquetFile(self.path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ITEMS):
                yield from batch.to_pylist()


@SOURCES.register("arrow")
class Arrow(Source):
    """Arrow's file format, or its stream format, which the library `datasets` writes."""

    def items(self) -> Iterator[Item]:
        from pyarrow import ipc, memory_map

        with self.reading("Arrow"), memory_map(str(self.path)) as file:
            is_file_format = file.read(6) == b"ARROW1"
            file.seek(0)
            if is_file_format:
                reader = ipc.open_file(file)
                batches = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = iter(ipc.open_stream(file))
            for batch in batches:
                yield from batch.to_pylist()


@SOURCES.register("hub")
class Table(Source):
    """A table of the library `datasets`, mapped from the disk: a saved folder, or a name on the Hugging Face hub."""

    def items(self) -> Iterator[Item]:
        for batch in self._table().iter(batch_size=BATCH_ITEMS):
            for values in zip(*batch.values(), strict=True):
                yield dict(zip(batch, values, strict=True))

    def identity(self) -> Mapping[str, str]:
        """Return hashes of a folder's contents, or the library's fingerprint, which includes the revision."""
        if self.path.exists():
            return {**(super().identity() or {}), "split": self.config.split}
        table = self._table()
        return {self.config.split: f"{len(table)} rows, fingerprint {table._fingerprint}"}

    def files(self) -> list[Path]:
        return [Path(table["filename"]) for table in self._table().cache_files]

    def _table(self) -> Any:
        path, subset, split = self.config.path, self.config.subset, self.config.split
        try:
            import datasets
        except ImportError as error:
            raise ConfigError(
                f"Data set {path!r} needs the package `datasets` ({error}). Install hpc-grpo[train], or use a .jsonl "
                f"file."
            ) from error
        if any((self.path / name).exists() for name in _SAVED):
            try:
                table = datasets.load_from_disk(path)
            except (OSError, ValueError, KeyError) as error:
                raise ConfigError(f"Data set folder {path} cannot be loaded: {error}") from error
            if isinstance(table, datasets.DatasetDict):
                if split not in table:
                    raise ConfigError(f"Data set folder {path} has no split {split!r}. Splits: {', '.join(table)}.")
                table = table[split]
            elif table.split is not None and split not in ("train", table.split):  # train is the default
                raise ConfigError(
                    f"Data set {path} holds split {table.split}, not {split}. Leave split out, or change the path."
                )
            return table
        if is_no_hub_name(path) and not self.path.exists():
            raise ConfigError(
                f"Data set {path!r}: there is no {self.path.absolute()}. Give a path that exists, or a name of the "
                f"Hugging Face hub."
            )
        try:
            return datasets.load_dataset(path, subset, split=split, trust_remote_code=False)
        except Exception as error:
            # The hub raises any error of its HTTP client. All of them mean the same to the user.
            shown = "" if subset is None else f", subset {subset!r}"
            raise ConfigError(
                f"Data set {path!r}{shown}, split {split!r} cannot be loaded: {type(error).__name__}: {error}\n"
                f"If the name is right and this machine is offline, fetch it once on the login node, with the same "
                f"HF_HOME as the job:\n"
                f'  python -c "import datasets; datasets.load_dataset({path!r}, {subset!r}, split={split!r})"\n'
                f"If it was meant as a file, no such file exists."
            ) from error


@SOURCES.register("function")
class Function(Source):
    """A function of the user's that yields items, called with `args` as keyword arguments."""

    def items(self) -> Iterator[Item]:
        name = self.config.path
        function = SOURCES.find(name)
        try:
            for number, item in enumerate(function(**self.config.args)):
                if not isinstance(item, dict):
                    raise ConfigError(f"{name}, item {number}: must be a dict of columns, not {type(item).__name__}.")
                yield item
        except HpcGrpoError:
            raise
        except Exception as error:  # A user's function may raise anything.
            raise ConfigError(f"{name} (data source) failed: {described(error)}") from error

    def identity(self) -> None:
        """Return None: a function's inputs are unknown, so its items are compared at every start."""
