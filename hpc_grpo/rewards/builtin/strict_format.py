"""Built-in reward: 1.0 when the completion is exactly one reasoning and one answer element, else 0.0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpc_grpo.rewards import reward


@reward("strict_format")
def strict_format(
    prompts: Sequence[str],
    completions: Sequence[str],
    reasoning_tag: str = "reasoning",
    answer_tag: str = "answer",
    **fields: Any,
) -> list[float]:
    """Match `<reasoning>…</reasoning><answer>…</answer>`: both once, in this order, neither empty, and nothing but
    white space before, between and after.
    """
    first, second = re.escape(reasoning_tag), re.escape(answer_tag)
    # No tag inside an element: "<answer>1</answer><answer>2</answer>" would let a model hedge.
    body = rf"\s*(?=\S)(?:(?!</?(?:{first}|{second})>).)+"
    pattern = re.compile(rf"\s*<{first}>{body}</{first}>\s*<{second}>{body}</{second}>\s*", re.DOTALL)
    return [float(pattern.fullmatch(completion) is not None) for completion in completions]
