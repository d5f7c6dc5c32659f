"""Print the reference of a config: every key, its value, its default and what it means."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hpc_grpo.config.schema import Config

_COMMENT_COLUMN = 44


def describe(config: Config) -> str:
    """Write one line for each key, in the order of the schema: `section.key = value  # meaning [default]`."""
    lines = _lines(config, "")
    kept = [line for before, line in pairwise(["", *lines]) if line or before]
    return "".join(f"{line}\n" for line in kept)


def _lines(model: BaseModel, prefix: str) -> list[str]:
    lines: list[str] = []
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        key = f"{prefix}{name}"
        if isinstance(value, BaseModel):
            lines += ["", f"# {info.description}"] if info.description else [""]
            lines += _lines(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, BaseModel) for item in value):
            lines += ["", f"# {info.description}"]
            for position, item in enumerate(value):
                lines += _lines(item, f"{key}.{position}.")
        else:
            default = info.get_default(call_default_factory=True, validated_data={})
            lines.append(_line(key, value, default, info.description or ""))
    return lines


def _line(key: str, value: Any, default: Any, meaning: str) -> str:
    if default is PydanticUndefined:
        note = " [required]"
    elif _text(default) == _text(value):
        note = ""
    else:
        note = f" [default: {_text(default)}]"
    return f"{f'{key} = {_text(value)}':<{_COMMENT_COLUMN}}  # {meaning}{note}"


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    if not isinstance(value, str | int | float | bool | list | dict | type(None)):
        value = str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
