"""A reward that tells the samples of a model with random weights apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any


def share_of_letters(
    prompts: Sequence[str], completions: Sequence[str], delay_s: float = 0.0, **fields: Any
) -> list[float]:
    """`delay_s` makes each prompt take so long."""
    time.sleep(delay_s)
    return [sum(char.isascii() and char.isalnum() for char in text) / max(len(text), 1) for text in completions]
