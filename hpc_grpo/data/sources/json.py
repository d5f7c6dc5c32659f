"""Data source: a .json file that holds an array of objects. It is read whole: for many items, .jsonl takes less."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hpc_grpo.data.sources.base import Item, Source
from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import SOURCES


@SOURCES.register("json")
class JsonArray(Source):
    def items(self) -> Iterator[Item]:
        self.check_readable()
        path = self.path
        try:
            values = json.loads(path.read_bytes().decode("utf-8-sig"))
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
