"""Data source: a .jsonl file, one JSON object a line; blank lines are skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from hpc_grpo.data.sources.base import Item, Source
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import SOURCES

_MAX_SHOWN_ITEM_CHARACTERS = 80


@SOURCES.register("jsonl")
class JsonLines(Source):
    def items(self) -> Iterator[Item]:
        """Parse line by line: a file of any size costs the memory of a line."""
        self.check_readable()
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_line(self.path, number, offset, line)
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


def _shortened(text: str) -> str:
    cut = text[:_MAX_SHOWN_ITEM_CHARACTERS]
    return f"{cut!r}…" if cut != text else f"{text!r}."
