"""Print the reference of a config: each key, its value, its default and its meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from hpc_grpo.config.checked import meant_key, sections_in
from hpc_grpo.config.schema import Config
from hpc_grpo.errors import ConfigError, nearest
from hpc_grpo.section import OWN, ByName, variants

_COMMENT_COLUMN = 44
_DEFAULT, _REQUIRED = " [default: ", " [required]"


def describe(config: Config, keys: Sequence[str] = (), *, only_changed: bool = False) -> str:
    """Return one line for each key, in the order of the schema: `section.key = value # meaning [default]`.

    `keys` limits the result to these keys or sections. `only_changed` keeps keys that are required or differ from their
    default. Raises ConfigError for keys that the config does not have.
    """
    lines = _lines(config, "", frozenset(config.lacking))
    names = [line.partition(" = ")[0] for line in lines]
    for key in keys:
        if not any(_is_below(name, key) for name in names):
            meant = meant_key(key, Config)
            is_shown = meant and any(_is_below(name, meant) for name in names)
            near = f"; did you mean {meant!r}?" if is_shown else nearest(key, filter(None, names))
            raise ConfigError(f"The config has no key {key!r}{near}")
    if keys:
        lines = [line for line, name in zip(lines, names, strict=True) if any(_is_below(name, key) for key in keys)]
    if only_changed:
        lines = [line for line in lines if line.endswith("]") and (_DEFAULT in line or line.endswith(_REQUIRED))]
    kept = [line for before, line in pairwise(["", *lines]) if line or before]
    return "".join(f"{line}\n" for line in kept)


def _is_below(name: str, key: str) -> bool:
    return f"{name}.".startswith(f"{key}.")


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
            before = None if default is PydanticUndefined else _text(default)
            note = _REQUIRED if before is None else "" if before == _text(value) else f"{_DEFAULT}{before}]"
            lines.append(f"{f'{key} = {_text(value)}':<{_COMMENT_COLUMN}}  # {meaning}{note}")
    return lines


def _names(kinds: Mapping[str, type[BaseModel]]) -> str:
    own = kinds[OWN].model_fields["name"].description or ""
    return f"{', '.join(name for name in kinds if name != OWN)}; or {own[0].lower()}{own[1:]}"


def _text(value: Any) -> str:
    if isinstance(value, tuple | list):
        value = [part.model_dump(mode="json") if isinstance(part, BaseModel) else part for part in value]
    if not isinstance(value, str | int | float | bool | list | dict | type(None)):
        value = str(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()


@dataclass(frozen=True)
class Key:
    """A key of the configuration, with its default as text ("required" without one) and its description."""

    name: str
    default: str
    meaning: str


def every_key(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, Key]:
    """Return every key of a section by name, with the keys of all variants. N in a name is a position in a list."""
    found: dict[str, Key] = {}
    for name, info in model.model_fields.items():
        is_list = get_origin(info.annotation) is list
        sections = list(sections_in(get_args(info.annotation)[0] if is_list else info.annotation, items=False))
        default = info.get_default(call_default_factory=True, validated_data={})
        for section in sorted(sections, key=lambda section: section is not type(default)):
            below = every_key(section, f"{prefix}{name}.N." if is_list else f"{prefix}{name}.")
            found |= {key: each for key, each in below.items() if key not in found}
        if any(isinstance(each, ByName) for each in info.metadata):
            own = f"{prefix}{name}.name"
            found[own] = replace(found[own], meaning=_names(variants(info.annotation)))
        if not sections:
            text = "required" if default is PydanticUndefined else _text(default)
            found[f"{prefix}{name}"] = Key(f"{prefix}{name}", text, info.description or "")
    return found
