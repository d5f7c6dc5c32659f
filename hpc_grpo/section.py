"""The base of every section: unknown keys are errors, values are frozen, and paths are expanded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
)
from pydantic_core import CoreSchema, core_schema

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]

VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


@dataclass(frozen=True)
class Loading:
    """Data for expanding paths while a config is loaded: the user's variables, and texts to leave unchanged."""

    environ: Mapping[str, str]
    resolved: frozenset[str] = frozenset()


class Section(BaseModel):
    """A section of the YAML file. `hpc-grpo config` prints a field's description beside its key."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


def _written_out(value: object, info: ValidationInfo) -> object:
    """Replace `~` and `$NAME`, except without `Loading`: a run directory's config has its paths expanded already.

    Raises ValueError for an unset or empty variable, and for an unknown user's home.
    """
    loading = info.context
    if not isinstance(loading, Loading) or not isinstance(value, str) or value in loading.resolved:
        return value
    text = VARIABLE.sub(lambda match: _value(match[1] or match[2], loading.environ), value)
    home, separator, below = text.partition("/")
    try:
        return f"{Path(home).expanduser()}{separator}{below}" if home.startswith("~") else text
    except RuntimeError as error:
        raise ValueError(f"no user of this machine has the home {home}. Give the full path") from error


def _value(name: str, environ: Mapping[str, str]) -> str:
    if found := environ.get(name):
        return found
    raise ValueError(f"{name} is not set here. Export it, or write out what it stands for")


LocalPath = BeforeValidator(_written_out)
"""Marks a key whose text is a path, or a name that may be a path, on the machine that loads the config.

Not for `launch.local_dir`, `launch.env` and `launch.notify`: these belong to the nodes of the run.
"""
PathText = Annotated[str, LocalPath]


OWN = "own"
"""The tag of the class for a user's function, among the variants of a key."""


@dataclass(frozen=True)
class ByName:
    """Marks a union of sections, selected by `name`; `default` is the choice without a name.

    A bare text is a name. A name with ":" is a user's function: the class whose `name` has no default.
    """

    default: str

    def __get_pydantic_core_schema__(self, union: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged = Union[tuple(Annotated[kind, Tag(tag)] for tag, kind in variants(union).items())]  # type: ignore[valid-type]  # noqa: UP007
        schema = handler.generate_schema(Annotated[tagged, Discriminator(self._tag)])
        return core_schema.no_info_before_validator_function(as_section, schema)

    def _tag(self, value: Any) -> Any:
        name = (value.get("name") or self.default) if isinstance(value, Mapping) else getattr(value, "name", None)
        return OWN if isinstance(name, str) and ":" in name else name


def as_section(value: Any) -> Any:
    """Return {"name": value} for a text. Return other values unchanged."""
    return {"name": value} if isinstance(value, str) else value


def variants(union: Any) -> dict[str, type[Section]]:
    """Map the names of a union's sections to their classes, with the user's class under OWN."""
    names = {kind: kind.model_fields["name"] for kind in get_args(union)}
    return {OWN if name.is_required() else name.default: kind for kind, name in names.items()}
