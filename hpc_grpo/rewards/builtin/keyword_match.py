"""Built-in reward: the fraction of keywords that the completion contains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import NoneType
from typing import Any

from pydantic import Field

from hpc_grpo.rewards import Group, reward
from hpc_grpo.section import Section


class KeywordMatchSettings(Section):
    keyword_list: list[str] | None = Field(None, description="Keywords; null: those of the row.")
    keyword_field: str = Field("keywords", description="Column with the keywords of each row.")
    case_sensitive: bool = Field(False, description="Upper and lower case differ.")


@reward("keyword_match", KeywordMatchSettings)
def keyword_match(group: Group, settings: KeywordMatchSettings) -> Iterator[float]:
    """Count keywords, as whole words. They are `keyword_list`, else the column `keyword_field`: a list of texts or
    one text with commas. An item without keywords scores 1.0: it asks for nothing.
    """
    wanted: Any = settings.keyword_list
    if wanted is None:
        wanted = group.column_of(settings, "keyword_field", str, list, NoneType)
    flags = 0 if settings.case_sensitive else re.IGNORECASE
    keywords = wanted.split(",") if isinstance(wanted, str) else wanted or []
    patterns = [re.compile(_pattern(text), flags) for keyword in keywords if (text := str(keyword).strip())]
    for completion in group.completions:
        found = sum(pattern.search(completion) is not None for pattern in patterns)
        yield found / len(patterns) if patterns else 1.0


def _pattern(keyword: str) -> str:
    """Return the pattern of a whole word or phrase: in Markdown's italics too, and across lines."""
    phrase = r"\s+".join(map(re.escape, keyword.split()))
    return rf"(?<!\w)_{{0,2}}{phrase}_{{0,2}}(?!\w)"
