"""Check what every item must have, before anything starts: an error names the source and the item's number."""

from __future__ import annotations

from typing import Any

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.sources.base import Item, answer_of
from hpc_grpo.errors import ConfigError


def check_item(source: SourceConfig, item: Item, number: int) -> None:
    """Raise ConfigError where item `number` lacks a column that the config names, or a usable prompt or answer."""
    prompt = "prompt_field" if source.messages_field is None else "messages_field"
    for key in (prompt, "answer_field"):
        name = getattr(source, key)
        if name is not None and name not in item and not (key == "answer_field" and _is_inside(item, name)):
            hint = ", or to null when there is no reference answer" if key == "answer_field" else ""
            raise ConfigError(
                f"Data set {source.path}, item {number}: there is no field {name!r} ({key}). "
                f"Fields: {', '.join(item) or 'none'}. Set {key} to one of them{hint}."
            )
    _check_answer(source, item, number)
    if source.messages_field is None and isinstance(item[source.prompt_field], str):
        check_not_empty(item[source.prompt_field], source.path, number)
        check_characters(item[source.prompt_field], source.path, number)


def _is_inside(item: Item, name: str) -> bool:
    """Tell whether a dotted name is that of a value inside a column."""
    try:
        answer_of(item, name)
    except KeyError:
        return False
    return True


def _check_answer(source: SourceConfig, item: Item, number: int) -> None:
    if source.answer_field is None:
        return
    answer = answer_of(item, source.answer_field)
    if answer is None:
        raise ConfigError(
            f"Item {number} of {source.path} (counted from 0): {source.answer_field!r} (answer_field) is null, and no "
            f"completion can be compared with that. Give it an answer, remove the item, or set answer_field to null "
            f"when the rewards need no reference."
        )
    if isinstance(answer, str):
        check_characters(answer, source.path, number)


def check_not_empty(prompt: str, path: str, number: int) -> None:
    if not prompt.strip():
        raise ConfigError(
            f"Item {number} of {path} (counted from 0) has an empty prompt: there is no token to go on from. Remove "
            f"the item, or give it text."
        )


def check_characters(text: str, path: str, number: int) -> None:
    """Raise ConfigError where `text`, of item `number` of `path`, holds half a character, as JSON may (\\ud83d)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"Item {number} of {path} (counted from 0) holds {text[error.start : error.end]!r}, half of a character, "
            f"which no tokenizer takes. Mend or remove the item."
        ) from error


def completion_text(source: SourceConfig, item: Item, number: int) -> str:
    """Return the text to imitate, the answer of item `number`. Raises ConfigError where it is no text, or empty."""
    text: Any = None if source.answer_field is None else answer_of(item, source.answer_field)
    if not isinstance(text, str) or not text:
        raise ConfigError(
            f"Item {number} of {source.path}: {source.answer_field!r} (answer_field), the completion to imitate, must "
            f"be text that is not empty, not {text!r}."
        )
    check_characters(text, source.path, number)
    return text
