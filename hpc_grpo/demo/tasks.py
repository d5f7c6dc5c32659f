"""Two-digit additions in GSM8K's format, and demonstrators who do not always get them right.

An item is `{"question": "What is 37+48?", "answer": "7+8=15 3+4+1=8 #### 85"}`. Demonstrators for the warm start are
sloppy: some guess, and those who work it out often forget the carry. Imitating them gives a policy that is right some
of the time, which is what GRPO needs: it strengthens what the verifier accepts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.files import write_atomic

_SMALLEST, _LARGEST = 10, 99
_GUESS_ERROR = 9
_MOST_ITEMS = (_LARGEST - _SMALLEST + 1) ** 2


@dataclass(frozen=True)
class Addition:
    """Hold one problem; both terms have two digits."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left}+{self.right}?"

    @property
    def answer(self) -> str:
        return self._worked(carries=True)

    def sloppy_answer(self, rng: random.Random, guessed: float, carry_forgotten: float) -> str:
        """Return a demonstration: with these probabilities a guess without working, or working without the carry."""
        if rng.random() < guessed:
            return f"#### {self.left + self.right + rng.randint(-_GUESS_ERROR, _GUESS_ERROR)}"
        return self._worked(carries=rng.random() >= carry_forgotten)

    def _worked(self, *, carries: bool) -> str:
        (left_tens, left_ones), (right_tens, right_ones) = divmod(self.left, 10), divmod(self.right, 10)
        ones, tens = left_ones + right_ones, left_tens + right_tens
        carry = ""
        if ones >= 10 and carries:
            tens, carry = tens + 1, "+1"
        columns = f"{left_ones}+{right_ones}={ones} {left_tens}+{right_tens}{carry}={tens}"
        return f"{columns} #### {tens * 10 + ones % 10}"


@dataclass(frozen=True)
class TaskSizes:
    """Say how many items each file holds, and how often demonstrators go wrong."""

    num_train: int = 1024
    num_eval: int = 128
    num_sft: int = 6000
    guessed: float = 0.4
    carry_forgotten: float = 0.65


def write_tasks(folder: Path, sizes: TaskSizes, seed: int) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl below `folder`; the same arguments give the same bytes.

    No problem of eval.jsonl is in another file; sft.jsonl holds train's problems and more, some repeatedly.
    Raises ConfigError when more problems are asked for than there are.
    """
    rng = random.Random(seed)
    numbers = range(_SMALLEST, _LARGEST + 1)
    problems = [Addition(left, right) for left in numbers for right in numbers]
    rng.shuffle(problems)
    if sizes.num_eval + max(sizes.num_train, 1) > _MOST_ITEMS:
        raise ConfigError(
            f"num_train + num_eval = {sizes.num_train + sizes.num_eval}: there are only {_MOST_ITEMS} "
            f"two-digit additions. Ask for fewer."
        )
    held_out, seen = problems[: sizes.num_eval], problems[sizes.num_eval :]
    demonstrated = [rng.choice(seen) for _ in range(sizes.num_sft)]
    _write(folder / "eval.jsonl", ((p.question, p.answer) for p in held_out))
    _write(folder / "train.jsonl", ((p.question, p.answer) for p in seen[: sizes.num_train]))
    _write(
        folder / "sft.jsonl",
        ((p.question, p.sloppy_answer(rng, sizes.guessed, sizes.carry_forgotten)) for p in demonstrated),
    )


def _write(path: Path, items: Iterable[tuple[str, str]]) -> None:
    lines = (json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in items)
    write_atomic(path, "".join(lines))
