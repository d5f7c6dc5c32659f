"""Built-in reward: 1.0 when a pattern matches the completion, else 0.0."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.section import Section


class RegexSettings(Section):
    pattern: str | None = Field(None, description="Pattern of Python; null: that of the row.")
    pattern_field: str = Field("pattern", description="Column with the pattern of each row.")
    mode: Literal["search", "fullmatch"] = Field("search", description="Match anywhere, or the whole completion.")
    ignore_case: bool = Field(False, description="Upper and lower case are equal.")

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"must be a pattern of Python's module re: {error}") from error
        return pattern


@reward("regex", RegexSettings)
def regex(group: Group, settings: RegexSettings) -> Iterator[float]:
    """Match `pattern`, else the column `pattern_field`: anywhere (`search`) or the whole text (`fullmatch`).

    A dot matches a newline too, as completions have several lines.
    """
    wanted: Any = settings.pattern
    if wanted is None:
        wanted = group.column_of(settings, "pattern_field", str)
    try:
        compiled = re.compile(wanted, re.DOTALL | (re.IGNORECASE if settings.ignore_case else 0))
    except re.error as error:
        raise ConfigError(f"the pattern {wanted!r} is not one of Python's: {error}.") from error
    match = compiled.search if settings.mode == "search" else compiled.fullmatch
    for completion in group.completions:
        yield float(match(completion) is not None)
