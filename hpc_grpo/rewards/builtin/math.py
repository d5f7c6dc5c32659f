"""Built-in rewards that compare a completion's answer with the reference: math, gsm8k, multiple_choice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Literal

from pydantic import Field

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, answers, reward
from hpc_grpo.rewards.builtin import ScoredHere
from hpc_grpo.section import Section


def load() -> None:
    from hpc_grpo.rewards.symbolic import are_equal

    are_equal(r"\sqrt{8}", r"2\sqrt{2}")  # the first comparison builds the parser


@reward("math", ScoredHere, load=load)
def math(group: Group, settings: Section) -> Iterator[float]:
    r"""Compare each completion with the item's `answer`: a number, words, or notation (`\sqrt{8}`, sets, matrices)."""
    wanted = answers.bare(answers.reference_answer(str(group.answer())))
    verdicts: dict[str, bool] = {}  # completions of a group often agree
    for completion in group.completions:
        given = answers.final_answer(completion, wanted)
        if given not in verdicts:
            verdict = answers.plain_verdict(given, wanted)
            if verdict is None:
                from hpc_grpo.rewards.symbolic import are_equal

                verdict = are_equal(given, wanted)
            verdicts[given] = verdict
        yield float(verdicts[given])


correctness = reward("correctness", math.settings, load=load)(math.function)
"""`math` under its older name."""


class Gsm8kSettings(ScoredHere):
    method: Literal["strict", "flexible"] = Field(
        "strict", description="strict: the number after ####; flexible: the last number."
    )


@reward("gsm8k", Gsm8kSettings)
def gsm8k(group: Group, settings: Gsm8kSettings) -> Iterator[float]:
    """Compare numbers with the number after `####` in the column `answer` (GSM8K, arXiv:2110.14168).

    `strict` only accepts the completion's number after `####`, and so trains the format too. `flexible` uses the
    completion's last number.
    """
    reference = str(group.answer())
    wanted = answers.parse_number(answers.after_hashes(reference) or reference)
    if wanted is None:
        raise ConfigError(f"the answer {reference!r} has no number after ####. Use the reward math.")
    for completion in group.completions:
        text = answers.plain_characters(answers.after_thoughts(completion))
        strict = answers.stated_number(answers.after_hashes(text) or "")
        yield float((answers.last_number(text) if settings.method == "flexible" else strict) == wanted)


_SENTENCE_END = re.compile(r"(?<=[a-z]{2}[.!?])\s+")
_IS = r"(?:is|was|are|(?:must|should|would|will)\sbe|[:=\u2192]|[-=]>):?"
_FILLER = (
    r"(?:[\s*]*\b(?:most|likely|probably|clearly|definitely|therefore|thus|indeed|the|letter|option|choice|answer)\b:?)"
    r"{0,6}"
)


class MultipleChoiceSettings(ScoredHere):
    letters: str = Field("ABCDE", min_length=1, description="Letters of the choices.")


@reward("multiple_choice", MultipleChoiceSettings)
def multiple_choice(group: Group, settings: MultipleChoiceSettings) -> Iterator[float]:
    r"""Compare the chosen letter with the column `answer`: a letter of `letters`, or its number counted from 0.

    The choice is in the marked answer (`\boxed{B}`, `<answer>B</answer>`, `#### B`), else in the last sentence that
    chooses ("the answer is B", "I pick B", "B is correct"), else in a completion or a last line that is `B`, `(B)` or
    `B. …`. A letter elsewhere is no choice, since every English text has an A. Two chosen letters are no choice either.
    """
    reference, letters = group.answer(), settings.letters
    wanted = str(reference).strip().strip("().").upper()
    if wanted.isdecimal() and not isinstance(reference, bool) and int(wanted) < len(letters):
        wanted = letters[int(wanted)].upper()
    elif len(wanted) != 1 or wanted not in letters.upper():
        raise ConfigError(
            f"the answer {reference!r} is none of the letters {letters}, nor a number from 0 to {len(letters) - 1}. "
            f"Set rewards.N.args.letters to the letters in use."
        )
    for completion in group.completions:
        yield float(chosen_letter(completion, letters) == wanted)


@cache
def patterns_of(letters: str) -> tuple[re.Pattern[str], ...]:
    """Return four patterns: a sentence that chooses a letter, a text that is the choice, a second letter beside a
    choice ("A or B"), and a line in a list of options.
    """
    upper, lower = re.escape(letters.upper()), re.escape(letters.lower())
    letter = (
        rf"[\s\[{{\"'*_$`]{{0,8}}\(?(?:([{upper}])|([{lower}])(?=[\s*]*(?:[).,;:]|$)))(?![\w+-]|'\w|\s*\?)"
        # The article A is no choice: "the answer is A large city".
        r"(?!(?<=A)\s+(?!(?:because|since|as|and|or|is|not|which|for|with)\b)[a-z])"
    )
    said = (
        rf"(?:\b(?i:(?:ans|answer|choice|option|selection)\b[\s*_\"']{{0,4}}(?:(?:to|for)\b[^.\n]{{0,80}}?)?\s?{_IS}{_FILLER})"
        rf"|\u7b54\u6848[\u662f\u4e3a:]){letter}"
        rf"|(?<!not\s)(?<!n't\s)\b(?i:(?:choose|chose|pick|select|selected|go\swith|opt\sfor|settled?\son){_FILLER}){letter}"
        rf"|{letter}\)?(?i:[*\s]+is\s(?:(?:the|clearly|most|indeed|only)\s)*(?:correct|right|best|answer)\b)"
        rf"|\b(?i:it(?:'s|\s(?:is|must\sbe))){letter}(?=[)*]*(?:[.,;!]|$|\s(?:because|since|as)\b))"
    )
    alone = (
        rf"(?:(?:[-*+>\u2192]|[-=]>)\s+)?(?i:(?:(?:final|correct|so|thus|hence|therefore|the|answer|option|choice|it\sis|it's|must\sbe)\b[\s,:*_]*)*)"
        rf"{letter}(?:[).:,*\]\"'`$_]|\s[-(]|[\s`]*$)"
    )
    another = (
        rf"[)*\s]*(?:(?:\b(?:or|and)\b|[/&])\s*[(*]*[{upper}](?![\w'])|,\s*[(*]*[{upper}][)*]*\W?(?:$|\s(?:or|and)\b))"
    )
    return tuple(map(re.compile, (said, alone, another, rf"(?m)^[\s(*-]*[{upper}][).:]")))


def chosen_letter(completion: str, letters: str) -> str | None:
    r"""Return the letter that a completion chooses; None for no choice, or two.

    >>> chosen_letter("The answer is B. Option A is wrong.", "ABCD"), chosen_letter("It is A or B", "ABCD")
    ('B', None)
    """
    said, alone, another, listed = patterns_of(letters)
    text = answers.LATEX_TEXT.sub(r"\1", answers.plain_characters(answers.after_thoughts(completion)))
    text = re.sub(r"\\[(\[]\s*(\w)\s*\\[)\]]", r"$\1$", text)  # a letter in notation
    marked = answers.marked_answer(text)
    text = (text if marked is None else marked).strip()
    last = answers.last_line(text)
    found = list(said.finditer(text))
    if not found and len(listed.findall(text)) < 2:
        found = [match for part in (text, last, _SENTENCE_END.split(last)[-1]) if (match := alone.match(part))]
    if not found:
        return None
    choice = found[-1]
    [letter] = filter(None, choice.groups())
    is_one = another.match(choice.string, choice.end(choice.lastindex or 0)) is None
    return str(letter).upper() if is_one else None
