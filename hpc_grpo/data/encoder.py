"""From items to rows: checked, rendered and tokenized. The costly part of a first start, which the cache keeps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date, time
from decimal import Decimal
from itertools import islice
from typing import Any

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.data.checks import check_item, check_not_empty, completion_text
from hpc_grpo.data.prompt_hash import prompt_hash
from hpc_grpo.data.sources.base import BATCH_ITEMS, Item
from hpc_grpo.data.templates import PromptTemplate, Tokenizer, encode_completions, prompt_style
from hpc_grpo.data.workers import Batch, encode_batches
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.pulse import PULSE


@dataclass(frozen=True)
class Row:
    """One item, ready to be asked: `fields` is the item as JSON, `prompt_hash` that of its own prompt (prompt_hash.py).
    `completion_ids` are empty where nothing is imitated.
    """

    text: str
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    fields: str
    prompt_hash: int


class Encoder:
    """Makes the rows of one source. Raises ConfigError for an item that cannot be used, with its number."""

    def __init__(self, config: Config, source: SourceConfig, tokenizer: Tokenizer) -> None:
        self._config = config
        self._source = source
        self._tokenizer = tokenizer
        self._template = PromptTemplate(config.data, source, tokenizer)

    def identity(self) -> dict[str, Any]:
        """Return all that the rows depend on, besides the items and the tokenizer."""
        source, needs_labels = self._source, self._config.needs.labels
        return {
            "style": asdict(prompt_style(self._config.data, source)),
            "columns": [source.prompt_field, source.answer_field, source.messages_field],
            "completion": needs_labels,
            "max_items": source.max_items,
        }

    def rows(self, items: Iterable[Item]) -> Iterator[Row]:
        """Yield the rows, made by several processes where there are many."""
        is_empty = True
        for rows in encode_batches(self, _batches(items)):
            is_empty = False
            yield from rows
            PULSE.beat()  # a first start may take minutes
        if is_empty:
            raise ConfigError(f"Data set {self._source.path} is empty. It must hold at least one item.")

    def digest(self, items: Iterable[Item]) -> str:
        """Return the digest of the items themselves."""
        hashed = hashlib.sha256()
        for number, item in enumerate(items):
            hashed.update(self._as_json(item, number).encode() + b"\n")
            if number % BATCH_ITEMS == 0:
                PULSE.beat()
        return hashed.hexdigest()[:32]

    def encode(self, items: Sequence[Item], first: int) -> list[Row]:
        """Return the rows of a batch whose first item has the number `first`."""
        numbered = list(enumerate(items, start=first))
        for number, item in numbered:
            check_item(self._source, item, number)
        texts = [self._template.render(item, number) for number, item in numbered]
        prompts = self._template.encode(texts)
        completions: Sequence[Sequence[int]] = [()] * len(items)
        if self._config.needs.labels:
            wanted = [completion_text(self._source, item, number) for number, item in numbered]
            completions = encode_completions(self._tokenizer, wanted)
        rows = []
        for (number, item), text, prompt, completion in zip(numbered, texts, prompts, completions, strict=True):
            check_not_empty(text if prompt else "", self._source.path, number)
            rows.append(Row(text, prompt, completion, self._as_json(item, number), prompt_hash(self._source, item)))
        return rows

    def _as_json(self, item: Mapping[str, Any], number: int) -> str:
        try:
            return json.dumps(item, default=_as_json_value)
        except TypeError as error:
            column = next((name for name, value in item.items() if not _is_json(value)), "?")
            raise ConfigError(
                f"Item {number} of {self._source.path}: column {column!r}: {error}. Columns must hold what JSON has: "
                f"text, numbers, lists and mappings. Remove the column from the data, or make it text (bytes: base64)."
            ) from error


def _batches(items: Iterable[Item]) -> Iterator[Batch]:
    remaining, first = iter(items), 0
    while batch := list(islice(remaining, BATCH_ITEMS)):
        yield batch, first
        first += len(batch)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, default=_as_json_value)
    except TypeError:
        return False
    return True


def _as_json_value(value: Any) -> Any:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy's
        return value.tolist()
    kind = "raw bytes (an image, a sound?)" if isinstance(value, bytes) else f"a {type(value).__name__}"
    raise TypeError(f"a value is {kind}")
