"""Built-in reward: the fraction of keywords that the completion contains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward


@reward("keyword_match")
def keyword_match(
    prompts: Sequence[str],
    completions: Sequence[str],
    keyword_list: Sequence[str] | None = None,
    keyword_field: str = "keywords",
    case_sensitive: bool = False,
    **fields: Any,
) -> list[float]:
    """Count keywords, as whole words. They are `keyword_list`, else the column `keyword_field`: a list of texts or
    one text with commas. An item without keywords scores 1.0: it asks for nothing.
    """
    if keyword_list is None and keyword_field not in fields:
        raise ConfigError(
            f"keyword_match needs keywords: set rewards.N.args.keyword_list, or keyword_field to a column. "
            f"There is no column {keyword_field!r}; columns: {', '.join(sorted(fields)) or 'none'}."
        )
    keywords = fields[keyword_field] if keyword_list is None else [keyword_list] * len(completions)
    flags = 0 if case_sensitive else re.IGNORECASE
    return [
        _found_fraction(completion, _as_list(wanted), flags)
        for completion, wanted in zip(completions, keywords, strict=True)
    ]


def _found_fraction(completion: str, keywords: Sequence[str], flags: int) -> float:
    if not keywords:
        return 1.0
    found = [re.search(rf"(?<!\w){re.escape(keyword)}(?!\w)", completion, flags) for keyword in keywords]
    return sum(match is not None for match in found) / len(keywords)


def _as_list(keywords: Any) -> list[str]:
    if keywords is None:
        return []
    values = keywords.split(",") if isinstance(keywords, str) else keywords
    return [text for value in values if (text := str(value).strip())]
