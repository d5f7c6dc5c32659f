"""Print the reference of a config: each key, its value, its default and its meaning."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import pairwise
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hpc_grpo.config.schema import Config
from hpc_grpo.section import OWN, ByName, variants

_COMMENT_COLUMN = 44


def describe(config: Config) -> str:
    """Return one line for each key, in the order of the schema: `section.key = value # meaning [default]`."""
    lines = _lines(config, "", frozenset(config.lacking))
    kept = [line for before, line in pairwise(["", *lines]) if line or before]
    return "".join(f"{line}\n" for line in kept)


def _lines(
    model: BaseModel,
    prefix: str,
    lacking: Set[str],
    default_model: Any = None,
    kinds: Mapping[str, type[BaseModel]] | None = None,
) -> list[str]:
    """Return the lines of a section, without the `lacking` keys.

    Defaults come from `default_model` if both have the same class. `kinds` are the section's possible variants.
    """
    lines: list[str] = []
    fields = list(type(model).model_fields.items())
    if kinds:
        fields.sort(key=lambda field: (field[0] != "name", isinstance(getattr(model, field[0]), BaseModel)))
    for name, info in fields:
        value, default = getattr(model, name), info.get_default(call_default_factory=True, validated_data={})
        if isinstance(default_model, type(model)):
            default = getattr(default_model, name)
        key = f"{prefix}{name}"
        if key in lacking:
            continue
        if isinstance(value, BaseModel):
            lines += ["", f"# {info.description}"] if info.description else [""]
            is_chosen = any(isinstance(each, ByName) for each in info.metadata)
            lines += _lines(value, f"{key}.", lacking, default, variants(info.annotation) if is_chosen else None)
        elif isinstance(value, list) and value and all(isinstance(item, BaseModel) for item in value):
            lines += ["", f"# {info.description}"]
            for position, item in enumerate(value):
                lines += _lines(item, f"{key}.{position}.", lacking)
        else:
            meaning = _names(kinds) if kinds and name == "name" else info.description or ""
            lines.append(_line(key, value, default, meaning))
    return lines


def _names(kinds: Mapping[str, type[BaseModel]]) -> str:
    own = kinds[OWN].model_fields["name"].description or ""
    return f"{', '.join(name for name in kinds if name != OWN)}; or {own[0].lower()}{own[1:]}"


def _line(key: str, value: Any, default: Any, meaning: str) -> str:
    if default is PydanticUndefined:
        note = " [required]"
    elif _text(default) == _text(value):
        note = ""
    else:
        note = f" [default: {_text(default)}]"
    return f"{f'{key} = {_text(value)}':<{_COMMENT_COLUMN}}  # {meaning}{note}"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        value = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in value]
    if not isinstance(value, str | int | float | bool | list | dict | type(None)):
        value = str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()
