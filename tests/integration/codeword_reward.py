"""Rewards of a task that cannot be solved without its image: answer a character of the class of the image's colour."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

COLOURS = {"red": 0, "lime": 1, "blue": 2, "white": 3}


def _class_of(text: str) -> int:
    return zlib.crc32(text[:1].encode()) % len(COLOURS)


def codeword(completions: Sequence[str], answer: Sequence[int], **columns: Any) -> list[float]:
    return [float(_class_of(text) == own) for text, own in zip(completions, answer, strict=True)]


def codeword_of_image(completions: Sequence[str], images: Sequence[Sequence[Any]], **columns: Any) -> list[float]:
    """Go by the colour that the image shows, whatever the data say."""
    from PIL import ImageColor

    classes = {ImageColor.getrgb(colour): number for colour, number in COLOURS.items()}
    pairs = zip(completions, images, strict=True)
    return [float(_class_of(text) == classes[own[0].getpixel((5, 5))]) for text, own in pairs]
