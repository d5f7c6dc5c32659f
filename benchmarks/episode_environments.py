"""The environments and the tool of episode_tasks.py, as files of a user's. Each prompt shows examples."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hpc_grpo import Turn


def chat(*texts: str) -> list[dict[str, str]]:
    """Give texts to the user and the assistant in turn."""
    return [{"role": "assistant" if index % 2 else "user", "content": text} for index, text in enumerate(texts)]


class GuessTheNumber:
    """A number from 1 to 8 in three guesses, with hints: perfect play finds 7 of 8."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        self._secret, self._left = random.Random(seed).randint(1, 8), 3
        begin = "Guess a number from 1 to 8. Write it in brackets."
        return chat(begin, "[4]", "Higher.", "[6]", "Right. A new game: a number from 1 to 8, 3 guesses.")

    def step(self, message: str) -> Turn:
        self._left -= 1
        found = re.search(r"\[(\d+)\]", message)
        guess = int(found[1]) if found else None
        if guess == self._secret or not self._left:
            return Turn(reward=float(guess == self._secret), done=True)
        if guess is None:
            return Turn("Write a number in brackets.")
        return Turn("Higher." if guess < self._secret else "Lower.")


class ReverseDigits:
    """Three digits in reverse, exactly, with a second try."""

    def reset(self, row: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        rng = random.Random(seed)
        self._digits, self._tries = [rng.randint(0, 9) for _ in range(3)], 2
        first, second = [4, 7, 1], [9, 0, 5]
        return chat(_asked(first), _shown(first[::-1]), _asked(second), _shown(second[::-1]), _asked(self._digits))

    def step(self, message: str) -> Turn:
        self._tries -= 1
        is_right = message.split() == _shown(self._digits[::-1]).split()
        if is_right or not self._tries:
            return Turn(reward=float(is_right), done=True)
        return Turn(f"Wrong. Try again. {_asked(self._digits)}")


def _asked(digits: Sequence[int]) -> str:
    return f"Reverse: {_shown(digits)}"


def _shown(digits: Sequence[int]) -> str:
    return " ".join(map(str, digits))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one number
        b: the other
    """
    return a + b


def games(count: int, first: int = 0) -> list[dict[str, int]]:
    """Rows for environments that draw their task from the seed."""
    return [{"game": first + number} for number in range(count)]


def sums(count: int, seed: int) -> list[dict[str, Any]]:
    """Sums of three digits, behind two examples of how the tool is called."""
    rng = random.Random(seed)

    def call(a: int, b: int) -> str:
        return f'<tool_call>\n{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'

    rows = []
    for _ in range(count):
        messages: list[dict[str, str]] = []
        for a, b in ((417, 285), (964, 138)):
            messages += chat(f"{a} + {b} = ?", call(a, b))
            messages += [{"role": "tool", "content": str(a + b)}, *chat("", f"The answer is {a + b}.")[1:]]
        a, b = rng.randint(100, 999), rng.randint(100, 999)
        rows.append({"messages": [*messages, *chat(f"{a} + {b} = ?")], "answer": str(a + b)})
    return rows
