"""Built-in reward: 1.0 when the completion is exactly one reasoning and one answer element, else 0.0."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import Field

from hpc_grpo.rewards import Group, reward
from hpc_grpo.section import Section


class StrictFormatSettings(Section):
    reasoning_tag: str = Field("reasoning", description="Name of the first element.")
    answer_tag: str = Field("answer", description="Name of the second element.")


@reward("strict_format", StrictFormatSettings)
def strict_format(group: Group, settings: StrictFormatSettings) -> Iterator[float]:
    """Match `<reasoning>…</reasoning><answer>…</answer>`: both once, in this order, neither empty, and nothing but
    white space before, between and after.
    """
    first, second = re.escape(settings.reasoning_tag), re.escape(settings.answer_tag)
    # No tag inside an element: "<answer>1</answer><answer>2</answer>" would let a model hedge.
    body = rf"\s*(?=\S)(?:(?!</?(?:{first}|{second})>).)+"
    pattern = re.compile(rf"\s*<{first}>{body}</{first}>\s*<{second}>{body}</{second}>\s*", re.DOTALL)
    for completion in group.completions:
        yield float(pattern.fullmatch(completion) is not None)
