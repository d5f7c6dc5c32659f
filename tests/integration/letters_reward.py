"""A reward that tells the samples of a model with random weights apart."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any


def share_of_letters(
    prompts: Sequence[str], completions: Sequence[str], delay_s: float = 0.0, **fields: Any
) -> list[float]:
    """`delay_s` makes each prompt take so long."""
    time.sleep(delay_s)
    return [sum(char.isascii() and char.isalnum() for char in text) / max(len(text), 1) for text in completions]


def one_in_three(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    """Pass a third of all texts, by their checksum: the rollouts of many a prompt are worth the same, not of all."""
    return [float(zlib.crc32(text.encode()) % 3 == 0) for text in completions]
