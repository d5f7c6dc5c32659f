"""Finds the answer in a completion, and judges the pairs that need no algebra: plain numbers and words.

Everything is one linear pass and every number is bounded in length: completions are written by a model in
training, which sooner or later emits ten thousand nines. What is left, mathematical notation, is judged by the library
math-verify 0.9 (`symbolic`), which is better at it than any parser of ours.

Two things stay ours. *Finding the answer*: math-verify's patterns take 7 s for a completion of 20,000 blanks, and it
takes an answer from elsewhere in the text where the box is empty. *Plain numbers and words*: exact, 40 times as fast,
and right where it is not. It takes 1.5e3 for 1.5·e·3 and `1 000` for 0, +7 and a plain `Paris` for wrong where they
stand in a text, 42e9999 for 42, and 0.333333 for 1/3.
"""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_NUMBER_CHARACTERS = 400
"""Longer numbers are no answers, and Python refuses to parse integers of more than 4300 digits."""

_UNSIGNED = r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
_NUMBER = re.compile(rf"([-+]?{_UNSIGNED})(?:\s*/\s*([-+]?{_UNSIGNED}))?")
# A sign counts only where it cannot be the minus between two operands: "5-3" ends in 3.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])[-+])?{_UNSIGNED}(?:\s*/\s*{_UNSIGNED})?")
# Not after a digit, where it is a mixed number.
_FRACTION = re.compile(r"(?<!\d)\\[dt]?frac(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))")
_THOUSANDS = re.compile(r"(?<=\d)(?:,|\{,\}|\\,)(?=\d{3}(?!\d))")
_GROUPS = re.compile(r"\d{1,3}(?: \d{3})+")
_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_WORDS = re.compile(r"[^\W\d_]{2,}(?:[\s,.'-]+[^\W\d_]+)*[.!]?")


def reference_answer(reference: str) -> str:
    r"""Return the answer in a reference: what follows GSM8K's last `####`, else the last box, else the whole text.

    >>> reference_answer("She has 40 + 2 = 42 eggs.\n#### 42")
    '42'
    """
    tail = after_hashes(reference)
    if tail is not None:
        return tail
    boxed = last_boxed(reference)
    return reference.strip() if boxed is None else boxed


def given_answer(completion: str) -> str | None:
    r"""Return the marked answer: the last complete `\boxed{}`, else the last `<answer>` element, else after `####`."""
    for find in (last_boxed, _last_answer_element, after_hashes):
        if (found := find(completion)) is not None:
            return found
    return None


def last_line(text: str) -> str:
    """Return the last line that is not blank; an empty text when there is none."""
    return (text.strip().splitlines() or [""])[-1].strip()


def plain_verdict(given: str, answer: str) -> bool | None:
    r"""Tell whether two answers are equal, where that takes no algebra; None where it does.

    >>> plain_verdict("3.0", "3"), plain_verdict("Paris.", "London"), plain_verdict(r"\sqrt{8}", r"2\sqrt2")
    (True, False, None)
    """
    if not (given.strip() and answer.strip()):
        return False
    if _plain(given) == _plain(answer):
        return True
    ours, theirs = parse_number(given), parse_number(answer)
    if ours is not None and ours == theirs:
        return True
    if ours is not None and theirs is not None:
        return None if "%" in given + answer else False  # 0.5 is 50 % too
    if _WORDS.fullmatch(given.strip()) and (theirs is not None or _WORDS.fullmatch(answer.strip())):
        return False
    return None


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of a text that is one number, else None. A percent sign is dropped, as GSM8K does.

    >>> parse_number("$1,200.50"), parse_number("-3 / 4"), parse_number("50%"), parse_number("5 or 6")
    (Fraction(2401, 2), Fraction(-3, 4), Fraction(50, 1), None)
    """
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    text = _without_marks(text).strip().rstrip(".").removesuffix("%").strip()
    match = _NUMBER.fullmatch(text.replace(" ", "") if _GROUPS.fullmatch(text) else text)
    if match is None:
        return None
    numerator, denominator = Fraction(match[1]), Fraction(match[2] or 1)
    return None if denominator == 0 else numerator / denominator


def last_number(text: str) -> Fraction | None:
    r"""Return the last number in `text`; None when there is none, or it is too long to be an answer.

    >>> last_number(r"3 apples and $\frac{4}{6}$ of a pear")
    Fraction(2, 3)
    """
    found = [match[0] for match in _NUMBER_IN_TEXT.finditer(_without_marks(text))]
    return parse_number(found[-1]) if found else None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` whose braces close.

    >>> last_boxed(r"\boxed{1} and \boxed{\frac{1}{2}} and \boxed{3")
    '\\frac{1}{2}'
    """
    open_braces: list[tuple[int, bool]] = []
    last: tuple[int, str] | None = None
    for match in _BRACE.finditer(text):
        token = match[0]
        if token == "}" and open_braces:
            start, boxed = open_braces.pop()
            if boxed and (last is None or start > last[0]):
                last = start, text[start : match.start()].strip()
        elif token == "{" or token.startswith("\\boxed"):
            open_braces.append((match.end(), token != "{"))
    return None if last is None else last[1]


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after GSM8K's last `####`; None where there is none."""
    _, mark, tail = text.rpartition("####")
    lines = tail.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def _last_answer_element(text: str) -> str | None:
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content.strip() if closing and opening else None


def _without_marks(text: str) -> str:
    """Rewrite a number as in prose: no dollars, no separators of thousands, a/b for a fraction, an ASCII minus."""
    text = text.replace("\u2212", "-").replace("\\$", "").replace("$", "").replace("\\%", "%")
    return _FRACTION.sub(r"\1\3/\2\4", _THOUSANDS.sub("", text))


def _plain(text: str) -> str:
    """Reduce a text to what is compared: no capitals, no spaces, no final dot."""
    return "".join(_without_marks(text).split()).rstrip(".").casefold()
