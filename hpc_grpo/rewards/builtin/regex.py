"""Built-in reward: 1.0 when a pattern matches the completion, else 0.0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward


@reward("regex")
def regex(
    prompts: Sequence[str],
    completions: Sequence[str],
    pattern: str | None = None,
    pattern_field: str = "pattern",
    mode: str = "search",
    ignore_case: bool = False,
    **fields: Any,
) -> list[float]:
    """Match `pattern`, else the column `pattern_field`: anywhere (`search`) or the whole text (`fullmatch`).

    A dot matches a newline too, as completions have several lines. A pattern whose matching explodes ends at the
    call's deadline, and masks its group.
    """
    if mode not in ("search", "fullmatch"):
        raise ConfigError(f"regex: mode is {mode!r}; set rewards.N.args.mode to search or fullmatch.")
    if pattern is None and pattern_field not in fields:
        raise ConfigError(
            f"regex needs a pattern: set rewards.N.args.pattern, or pattern_field to a column. There is no column "
            f"{pattern_field!r}; columns: {', '.join(sorted(fields)) or 'none'}."
        )
    patterns = [pattern] * len(completions) if pattern is not None else fields[pattern_field]
    flags = re.DOTALL | (re.IGNORECASE if ignore_case else 0)
    return [
        float(getattr(_compiled(str(wanted), flags), mode)(completion) is not None)
        for completion, wanted in zip(completions, patterns, strict=True)
    ]


def _compiled(pattern: str, flags: int) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ConfigError(f"regex: the pattern {pattern!r} is not one of Python's: {error}.") from error
