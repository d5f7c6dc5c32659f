"""Built-in reward: 1.0 when the completion chooses the letter of the reference, else 0.0."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.answers import given_answer

_LATEX_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{([^{}]*)\}")
_SAID = r"(?i:answer|choice|option)\W{0,3}(?i:\s(?:is|was|:))?[\s:*(\"'$]{0,6}"


@reward("multiple_choice")
def multiple_choice(
    prompts: Sequence[str],
    completions: Sequence[str],
    answer: Sequence[Any] | None = None,
    letters: str = "ABCDE",
    **fields: Any,
) -> list[float]:
    r"""Compare the chosen letter with the column `answer`: a letter of `letters`, or its number counted from 0.

    The choice is the marked answer (`\boxed{B}`, `<answer>B</answer>`, `#### B`), else what the last "answer is B" or
    "answer: B" says, else the completion itself where it is `B`, `(B)` or `B. …`. Two different letters in a marked
    answer are no choice, and neither is a letter somewhere in the text: every English text has an A.
    """
    if answer is None:
        raise ConfigError("multiple_choice compares with a letter; set data.*.answer_field to its column.")
    said = re.compile(rf"{_SAID}([{re.escape(letters)}])(?![\w'])")
    alone = re.compile(rf"[\s(*]*([{re.escape(letters)}])(?:[).:*][\s\S]*|\s*)")
    return [
        float(_choice(completion, letters, said, alone) == _wanted(reference, letters))
        for completion, reference in zip(completions, answer, strict=True)
    ]


def _wanted(reference: Any, letters: str) -> str:
    text = str(reference).strip().strip("().").upper()
    if text.isdecimal() and not isinstance(reference, bool) and int(text) < len(letters):
        return letters[int(text)]
    if len(text) != 1 or text not in letters.upper():
        raise ConfigError(
            f"multiple_choice: the answer {reference!r} is none of the letters {letters}, nor a number from 0 to "
            f"{len(letters) - 1}. Set rewards.N.args.letters to the letters in use."
        )
    return letters[letters.upper().index(text)]


def _choice(completion: str, letters: str, said: re.Pattern[str], alone: re.Pattern[str]) -> str | None:
    marked = given_answer(completion)
    if marked is None:
        found = said.findall(completion)
        match = alone.fullmatch(completion)
        return found[-1] if found else match[1] if match else None
    named = set(re.findall(rf"(?<!\w)[{re.escape(letters)}](?!\w)", _LATEX_TEXT.sub(r"\1", marked)))
    # "B. A cat": the letter in front counts, not the article behind it.
    first = alone.match(_LATEX_TEXT.sub(r"\1", marked).strip())
    if first is not None:
        return first[1] if len(named) == 1 or re.match(r"\(?\w[).:]", first[0].strip()) else None
    return named.pop() if len(named) == 1 else None
