"""Data sets: a .jsonl or .json file, a folder of a saved data set, or a name on the hub.

Consumes a `DatasetConfig`; produces items, an indexable sequence of dicts whose named columns exist.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config, DatasetConfig
from hpc_grpo.errors import ConfigError

Item = dict[str, Any]
Items = Sequence[Item]

_SAVED_MARKERS = ("dataset_info.json", "dataset_dict.json")
_MAX_SHOWN_ITEM_CHARACTERS = 80


def load_items(config: DatasetConfig) -> Items:
    """Load the items of a data set, at most `max_items`, in file order.

    Raises ConfigError when the source cannot be read, is empty, or lacks a column that the config names.
    """
    path = Path(config.path)
    if path.suffix == ".jsonl":
        return _checked_list(config, list(islice(_read_jsonl(path), config.max_items)))
    if path.suffix == ".json":
        return _checked_list(config, _read_json_array(path)[: config.max_items])
    if path.is_file():
        raise ConfigError(
            f"Data set {path}: files must end in .jsonl or .json, not {path.suffix or 'nothing'!r}. "
            f"Convert it, or save it with datasets.Dataset.save_to_disk and give the folder."
        )
    saved = path.is_dir() and any((path / marker).exists() for marker in _SAVED_MARKERS)
    return _checked_table(config, _read_saved(config) if saved else _read_named(config))


def completion_text(config: Config, item: Item, number: int) -> str:
    """Return the text to imitate of item `number`. Raises ConfigError for a missing or empty one."""
    path, field = config.data.train.path, config.sft.completion_field
    if field not in item:
        raise ConfigError(
            f"Item {number} of {path}: there is no field {field!r} (sft.completion_field). "
            f"Fields: {', '.join(item)}. Set sft.completion_field to one of them."
        )
    text = item[field]
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"Item {number} of {path}: {field!r} (sft.completion_field) must be text that is not empty, not {text!r}."
        )
    check_characters(text, path, number)
    return text


def check_characters(text: str, path: str, number: int) -> None:
    """Raise ConfigError where `text`, of item `number` of `path`, holds half a character, as JSON may (\\ud83d)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"Item {number} of {path} (counted from 0) holds {text[error.start : error.end]!r}, half of a character, "
            f"which no tokenizer takes. Mend or remove the item."
        ) from error


def _read_jsonl(path: Path) -> Iterator[Item]:
    """Parse line by line: a file of any size costs the memory of the items taken from it."""
    offset = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _parse_line(path, number, offset, line)
            offset += len(line)


def _parse_line(path: Path, number: int, offset: int, line: bytes) -> Item:
    """`offset` is the position of the line's first byte in the file."""
    try:
        text = line.decode("utf-8-sig" if offset == 0 else "utf-8")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}, line {number}, byte {offset + error.start}: not valid UTF-8 ({error.reason}). "
            f"Save the file as UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        at = offset + len(line.decode("utf-8")[: error.pos].encode())
        raise ConfigError(
            f"{path}, line {number}, byte {at}: not valid JSON ({error.msg}). "
            f"Every line must be one JSON object; the line reads {_shortened(text.strip())}"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}, line {number}, byte {offset}: must be a JSON object such as "
            f'{{"question": "…", "answer": "…"}}, not {type(value).__name__}.'
        )
    return value


def _read_json_array(path: Path) -> list[Item]:
    with _open(path) as file:
        content = file.read()
    try:
        values = json.loads(content.decode("utf-8-sig"))
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
    return values


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"Data set {path} cannot be read ({error.strerror}; looked at {path.absolute()}). "
            f"Check data.train.path and data.eval.path."
        ) from error


def _read_saved(config: DatasetConfig) -> Any:
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


def _read_named(config: DatasetConfig) -> Any:
    datasets = _datasets_module(config)
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


def _datasets_module(config: DatasetConfig) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"Data set {config.path!r} needs the package `datasets` ({error}). "
            f"Install hpc-grpo[train], or use a .jsonl file."
        ) from error
    return datasets


def _checked_list(config: DatasetConfig, items: list[Item]) -> Items:
    _check_not_empty(config, items)
    for number, item in enumerate(items):
        _check_columns(config, item, f"item {number}")
    return items


def _checked_table(config: DatasetConfig, table: Any) -> Items:
    _check_not_empty(config, table)
    _check_columns(config, table.column_names, "the data set")
    if config.max_items is not None and config.max_items < len(table):
        table = table.select(range(config.max_items))
    items: Items = table
    return items


def _check_not_empty(config: DatasetConfig, items: Any) -> None:
    if len(items) == 0:
        raise ConfigError(f"Data set {config.path} is empty. It must hold at least one item.")


def _check_columns(config: DatasetConfig, columns: Collection[str], where: str) -> None:
    prompt = "prompt_field" if config.messages_field is None else "messages_field"
    for key in (prompt, "answer_field"):
        name = getattr(config, key)
        if name is not None and name not in columns:
            hint = ", or to null when there is no reference answer" if key == "answer_field" else ""
            raise ConfigError(
                f"Data set {config.path}, {where}: there is no field {name!r} ({key}). "
                f"Fields: {', '.join(columns) or 'none'}. Set {key} to one of them{hint}."
            )


def _shortened(text: str) -> str:
    cut = text[:_MAX_SHOWN_ITEM_CHARACTERS]
    return f"{cut!r}…" if cut != text else f"{text!r}."
