"""A reward that tells the samples of a model with random weights apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def share_of_letters(prompts: Sequence[str], completions: Sequence[str], **fields: Any) -> list[float]:
    return [sum(char.isascii() and char.isalnum() for char in text) / max(len(text), 1) for text in completions]
