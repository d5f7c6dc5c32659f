"""Turn items into rows: check, render and tokenize. This is the slow part of a first start, so rows are cached.

An error names the source and the item's number, before anything starts. A login node uses the checks and `prompt_hash`
too: they need no numpy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date, time
from decimal import Decimal
from itertools import islice
from numbers import Number
from pathlib import Path
from typing import Any

from hpc_grpo.config import Config, SourceConfig
from hpc_grpo.data.cache import Row
from hpc_grpo.data.images import MARK, image_size, images_in, images_of, is_image
from hpc_grpo.data.sources import BATCH_ITEMS, Item, read_items
from hpc_grpo.data.stream import answer_of
from hpc_grpo.data.templates import (
    PromptTemplate,
    Tokenizer,
    check_characters,
    check_messages,
    check_not_empty,
    check_text,
    encode_completions,
    prompt_style,
    source_text,
)
from hpc_grpo.data.tokenizer import load_processor
from hpc_grpo.data.workers import Batch, encode_batches
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.pulse import PULSE


class Encoder:
    """Makes the rows of one source. Raises ConfigError with the item's number for an item that cannot be used."""

    def __init__(self, config: Config, source: SourceConfig, tokenizer: Tokenizer) -> None:
        self._config, self._source, self._tokenizer = config, source, tokenizer
        self._template = PromptTemplate(config.data, source, tokenizer)
        self._processor = None if config.data.images is None else load_processor(config)

    def identity(self) -> dict[str, Any]:
        """Return all that the rows depend on, besides the items and the tokenizer."""
        source, data = self._source, self._config.data
        return {
            "style": asdict(prompt_style(data, source)),
            "columns": [source.prompt_field, source.answer_field, source.messages_field],
            "completion": self._config.needs.labels,
            "max_items": source.max_items,
            **({"images": [data.images, data.max_pixels]} if data.images is not None else {}),
        }

    def rows(self, items: Iterable[Item]) -> Iterator[Row]:
        """Yield the rows. Several processes make them if there are many."""
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
            hashed.update(as_json(self._source, item, number).encode() + b"\n")
            if number % BATCH_ITEMS == 0:
                PULSE.beat()
        return hashed.hexdigest()[:32]

    def encode(self, items: Sequence[Item], first: int) -> list[Row]:
        """Return the rows of a batch whose first item has the number `first`."""
        numbered = list(enumerate(items, start=first))
        for number, item in numbered:
            check_item(self._source, item, number, self._config.data.images)
        if self._processor is not None:
            return [self._row_with_images(item, number) for number, item in numbered]
        parsed = [(number, with_messages(self._source, item, number)) for number, item in numbered]
        texts = [self._template.render(item, number) for number, item in parsed]
        prompts = self._template.encode(texts)
        completions: Sequence[Sequence[int]] = [()] * len(items)
        if self._config.needs.labels:
            wanted = [completion_text(self._source, item, number) for number, item in numbered]
            completions = encode_completions(self._tokenizer, wanted)
        rows = []
        for (number, item), given, text, prompt, completion in zip(
            parsed, items, texts, prompts, completions, strict=True
        ):
            check_not_empty(text if prompt else "", self._source.path, number)
            fields = as_json(self._source, given, number)
            rows.append(Row(text, prompt, completion, fields, prompt_hash(self._source, item)))
        return rows

    def _row_with_images(self, item: Item, number: int) -> Row:
        """Return the row of an item. The row's `fields` have digests instead of the images.

        Messages that are JSON text stay as they are: OpenRLHF-M's reward server finds a row by this text.
        """
        source, column, where = self._source, str(self._config.data.images), f"Item {number} of {self._source.path}"
        path = Path(source.path)
        folder = path if path.is_dir() else path.parent if path.is_file() else Path()
        parsed = with_messages(source, item, number)
        try:
            held = images_in(parsed[column]) if column == source.messages_field else item[column]
            images = images_of(held, folder, self._config.data.max_pixels)
            text = self._template.render(parsed, number, len(images))
            assert self._processor is not None
            sizes = [image_size(image) for image in images]
            counts = self._processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"] if sizes else []
        except ValueError as error:  # of images, of a processor
            raise ConfigError(f"{where} (counted from 0), {column!r} (data.images): {error}") from error
        [prompt] = self._template.encode([text])
        if (places := prompt.count(self._processor.image_token_id)) != len(images):
            raise ConfigError(
                f"{where} (counted from 0): its prompt has {places} image tokens, and there are {len(images)} images. "
                f"Write {MARK} where an image stands, and no other image token in texts or the chat template."
            )
        digests = [hashlib.sha256(image).hexdigest() for image in images]
        is_text = column == source.messages_field and isinstance(item[column], str)
        fields = as_json(source, item if is_text else {**item, column: digests}, number)
        hashed = prompt_hash(source, parsed, digests)
        return Row(text, prompt, (), fields, hashed, images, sum(counts) - len(counts))


def as_json(source: SourceConfig, item: Mapping[str, Any], number: int) -> str:
    """Return the columns of item `number`. Raises ConfigError for a value that JSON does not have."""
    try:
        return json.dumps(item, default=_as_json_value)
    except TypeError as error:
        column = next((name for name, value in item.items() if not _is_json(value)), "?")
        raise ConfigError(
            f"Item {number} of {source.path}: column {column!r}: {error}. Columns must hold what JSON has: "
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


def check_item(source: SourceConfig, item: Item, number: int, images: str | None = None) -> None:
    """Raise ConfigError if item `number` lacks a column that the config names, or a usable prompt or answer.

    `images` is `data.images`, the name of a column.
    """
    where = f"Item {number} of {source.path} (counted from 0)"

    def column(key: str, hint: str = "") -> Any:
        name = getattr(source, key)
        try:
            return answer_of(item, name) if key == "answer_field" else item[name]
        except KeyError:
            raise ConfigError(
                f"Data set {source.path}, item {number}: there is no field {name!r} ({key}). "
                f"Fields: {', '.join(item) or 'none'}. Set {key} to one of them{hint}."
            ) from None

    if images is not None and images not in item:
        raise ConfigError(
            f"{where}: there is no field {images!r} (data.images). Fields: {', '.join(item)}. Set data.images to "
            f"the column with the images."
        )
    key = "prompt_field" if source.messages_field is None else "messages_field"
    prompt = None if getattr(source, key) is None else column(key)
    if source.answer_field is not None:
        answer = column("answer_field", ", or to null when there is no reference answer")
        if answer is None or (isinstance(answer, Number) and answer != answer):
            raise ConfigError(
                f"{where}: {source.answer_field!r} (answer_field) is null or NaN, and no completion can be compared "
                f"with that. Give it an answer, remove the item, or set answer_field to null when the rewards need no "
                f"reference."
            )
        if isinstance(answer, str):
            check_characters(answer, source.path, number)
    if source.messages_field is None and source.prompt_field is not None:
        check_characters(check_text(prompt, source, number), source.path, number)


def completion_text(source: SourceConfig, item: Item, number: int) -> str:
    """Return the text to imitate, the answer of item `number`. Raises ConfigError if it is no text, or empty."""
    text: Any = None if source.answer_field is None else answer_of(item, source.answer_field)
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"Item {number} of {source.path}: {source.answer_field!r} (answer_field), the completion to imitate, "
            f"must be non-empty text, not {text!r}."
        )
    check_characters(text, source.path, number)
    return text


def with_messages(source: SourceConfig, item: Item, number: int) -> Item:
    """Return item `number` with its chat messages, if it has any, as a checked list."""
    field = source.messages_field
    return item if field is None else {**item, field: check_messages(item[field], source, number)}


def prompt_hash(source: SourceConfig, item: Item, images: Sequence[str] = ()) -> int:
    """Hash an item's prompt and its `images`' digests to 64 bits. Text in a column and in messages has the same hash.

    Templates, white space and system messages do not count. A message's content may be a list of parts, or None beside
    tool calls.
    """
    if source.messages_field is None:
        own = source_text(source, item)
    else:
        contents = [message["content"] or "" for message in item[source.messages_field] if message["role"] != "system"]
        parts = [part for content in contents for part in ([content] if isinstance(content, str) else content)]
        parts = [part for part in parts if not (images and is_image(part))]
        texts = [part["text"] if isinstance(part, Mapping) and "text" in part else part for part in parts]
        own = " ".join(
            text if isinstance(text, str) else json.dumps(text, sort_keys=True, default=str) for text in texts
        )
    hashed = " ".join([*own.split(), *images])
    digest = hashlib.blake2b(hashed.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def prompt_hashes(source: SourceConfig) -> Iterator[int]:
    """Yield the hash of each prompt of a source without images. Raises ConfigError for an item without a prompt."""
    for number, item in enumerate(read_items(source)):
        check_item(source, item, number)
        yield prompt_hash(source, with_messages(source, item, number))


def held_out_below(fraction: float) -> int:
    """Return the bound below which prompt hashes are held out for eval."""
    return int(fraction * 2.0**64)


def refuse_share(share: float, hashes: Iterable[int]) -> None:
    """Raise ConfigError if data.held_out = `share` holds out none of the prompts, or all of them."""
    is_held = (number < held_out_below(share) for number in hashes)
    first = next(is_held, False)
    if all(other == first for other in is_held):
        what, fix = ("everything", "Lower it") if first else ("nothing", "Set eval.every to null, raise the share")
        raise ConfigError(f"data.held_out = {share:g} holds {what} out of data.train. {fix}, or set data.eval instead.")
