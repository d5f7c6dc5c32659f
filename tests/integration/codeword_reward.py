"""Rewards of a task that cannot be solved without its image: answer a character of the class of the image's colour."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

COLOURS = {"red": 0, "lime": 1, "blue": 2, "white": 3}


def _class_of(text: str) -> int:
    return zlib.crc32(text[:1].encode()) % len(COLOURS)


def codeword(completions: Sequence[str], answer: Sequence[int | str], **columns: Any) -> list[float]:
    """Compare with the class of each row: a number, or one between dollars as MathV60K has it."""
    wanted = (int(str(own).strip("$")) for own in answer)
    return [float(_class_of(text) == own) for text, own in zip(completions, wanted, strict=True)]


def codeword_of_image(
    completions: Sequence[str], images: Sequence[Sequence[Any]], answer: Sequence[int | str], **columns: Any
) -> list[float]:
    """Go by the colour that the first image shows, whatever the data say; without an image, by the data."""
    from PIL import ImageColor

    classes = {tuple(c > 127 for c in ImageColor.getrgb(colour)): number for colour, number in COLOURS.items()}
    shown = (
        classes[tuple(channel > 127 for channel in own[0].getpixel((5, 5)))] if own else wanted
        for own, wanted in zip(images, answer, strict=True)
    )
    return codeword(completions, [*shown])
