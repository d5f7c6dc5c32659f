"""Write the demo's FOLDER/model and FOLDER/{train,eval,sft}.jsonl: `python -m hpc_grpo.demo.make FOLDER`.

An item is a two-digit addition in GSM8K's format: `{"question": "What is 37+48?", "answer": "7+8=15 3+4+1=8 #### 85"}`.
Demonstrators for the warm start make errors: some guess, and others often forget the carry. A policy that imitates them
is right some of the time. GRPO needs such a policy: it strengthens the answers that the verifier accepts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.files import write_atomic

_NUMBERS = range(10, 100)
_GUESS_ERROR = 9
GUESSED, CARRY_FORGOTTEN = 0.4, 0.65
"""How often demonstrators guess, and how often the others forget the carry."""


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--seed", default=0, show_default=True, help="Seed of the problems, the errors and the initial weights.")
@click.option("--hidden-size", default=128, show_default=True)
@click.option("--layers", default=3, show_default=True)
@click.option("--heads", default=4, show_default=True)
@click.option("--untied", is_flag=True, help="Give the output layer its own weights.")
@click.option("--num-train", default=1024, show_default=True)
@click.option("--num-eval", default=128, show_default=True)
@click.option("--num-sft", default=6000, show_default=True)
def main(
    folder: Path,
    seed: int,
    hidden_size: int,
    layers: int,
    heads: int,
    untied: bool,
    num_train: int,
    num_eval: int,
    num_sft: int,
) -> None:
    """Create the demo's model and task sets below FOLDER."""
    # Imported here, so that --help and a mistyped option need no torch.
    from hpc_grpo.demo.model import ModelSize, write_model

    write_tasks(folder, num_train, num_eval, num_sft, seed)
    size = ModelSize(hidden_size=hidden_size, num_layers=layers, num_heads=heads, tie_embeddings=not untied)
    num_parameters = write_model(folder / "model", size, seed)
    click.echo(
        f"{folder}: a model of {num_parameters:,} parameters, "
        f"{num_train} train, {num_eval} eval and {num_sft} sft items"
    )


def write_tasks(folder: Path, num_train: int, num_eval: int, num_sft: int, seed: int) -> None:
    """Write train.jsonl, eval.jsonl and sft.jsonl in `folder`. The same arguments give the same bytes.

    sft.jsonl draws, with repeats, from all problems that are not in eval.jsonl; so does train.jsonl, without. Raises
    ConfigError if there are fewer problems than requested.
    """
    rng = random.Random(seed)
    problems = [Addition(left, right) for left in _NUMBERS for right in _NUMBERS]
    rng.shuffle(problems)
    if num_eval + max(num_train, 1) > len(problems):
        raise ConfigError(
            f"num_train + num_eval = {num_train + num_eval}: there are only {len(problems)} two-digit additions. "
            f"Ask for fewer."
        )
    held_out, seen = problems[:num_eval], problems[num_eval:]
    demonstrated = [rng.choice(seen) for _ in range(num_sft)]
    _write(folder / "eval.jsonl", ((p.question, p.answer) for p in held_out))
    _write(folder / "train.jsonl", ((p.question, p.answer) for p in seen[:num_train]))
    _write(folder / "sft.jsonl", ((p.question, p.sloppy_answer(rng)) for p in demonstrated))


@dataclass(frozen=True)
class Addition:
    left: int
    right: int

    @property
    def question(self) -> str:
        return f"What is {self.left}+{self.right}?"

    @property
    def answer(self) -> str:
        return self._worked(carries=True)

    def sloppy_answer(
        self, rng: random.Random, guessed: float = GUESSED, carry_forgotten: float = CARRY_FORGOTTEN
    ) -> str:
        """Return a demonstration: with these probabilities a guess without steps, or steps without the carry."""
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


def _write(path: Path, items: Iterable[tuple[str, str]]) -> None:
    lines = (json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in items)
    write_atomic(path, "".join(lines))


if __name__ == "__main__":
    main()
