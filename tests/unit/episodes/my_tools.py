"""Tools of the tests, as a user's file has them."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Literal


def lookup(key: str, times: int = 1, mood: Literal["calm", "loud"] = "calm", ids: list[int] | None = None) -> str:
    """Look a word up in the book.

    It knows few words.

    Args:
        key: The word, or
            what it is.
        times: How often to say it.

    Returns:
        What the book says.
    """
    if key == "nothing":
        raise ValueError("the book has no such word")
    return f"{key}!" * times


async def slow(seconds: float) -> float:
    """Wait."""
    await asyncio.sleep(seconds)
    return seconds


def misbehave(how: str):
    """Do what a tool should not."""
    if how == "hang":
        time.sleep(3600)
    if how == "exit":
        os._exit(3)
    if how == "quit":
        sys.exit(3)
    if how == "time out":
        raise TimeoutError("the book did not open")
    if how == "break":
        raise ConnectionError("the database is away")
    if how == "flood":
        return "x" * 10_000_000
    if how == "lie":
        return {"text": b"\xff", "half": "\ud83d"}
    return None


def undocumented(word: str) -> str:
    return word


def of_anything(*words: str) -> str:
    """Say words."""
    return " ".join(words)
