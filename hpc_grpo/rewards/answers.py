"""Reads answers out of text and compares them.

Everything is one linear pass and every number is bounded in length: completions are written by a model in
training, which sooner or later emits ten thousand nines.

Ours, and not math-verify 0.9, for its verdicts and its speed. Told which part of a completion is the answer, it still
judges five of the cases in this module's tests otherwise (it takes 42e9999 for 42, and -5 with Unicode's minus, +7,
1.5e3 and a plain `Paris` for wrong). It takes 2.7 ms a pair where this module takes 0.07, 0.6 s to import where a
worker starts in 0.05, and 7 s for a completion of 20,000 blanks. A reward of your own may call it; the pool kills what
takes too long.
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
_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_ASSIGNMENT = re.compile(r"^[A-Za-z]\s*=\s*")
_UNIT = re.compile(r"(?<=\d)\s+[A-Za-z][A-Za-z. ]*$")

_LATEX_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\u2212", "-"),
        (r"\\[dt]frac", r"\\frac"),
        (r"(?<=\d)\\frac", r" \\frac"),
        (r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
        (r"\\frac\s*(\d)\s*(\d)", r"\1/\2"),
        (r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
        (r"\{,\}", ","),
        (r"\\(?:left|right)(?![a-z])|\\[,;!]|\^\s*\{?\\circ\}?|\\?\$", ""),
        (r"\\%", "%"),
        # Only thousands: "1,2" stays two numbers.
        (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    )
)


def reference_answer(reference: str) -> str:
    r"""Return the answer in a reference: what follows GSM8K's last `####`, else the last box, else the whole text.

    >>> reference_answer("She has 40 + 2 = 42 eggs.\n#### 42")
    '42'
    """
    tail = _after_hashes(reference)
    if tail is not None:
        return tail
    boxed = last_boxed(reference)
    return reference.strip() if boxed is None else boxed


def is_correct(completion: str, answer: str) -> bool:
    r"""Tell whether the answer given in `completion` equals `answer`.

    The given answer is the last complete `\boxed{}`, else the last `<answer>` element, else what follows the
    last `####`; without any of them it is the last number, or, for an `answer` that is no number, the last
    line.

    >>> is_correct("So x = \\boxed{\\frac{1}{2}}.", "0.5"), is_correct("5 - 3 is 2.", "-3")
    (True, False)
    """
    given = last_boxed(completion)
    if given is None:
        given = _last_answer_element(completion)
    if given is None:
        given = _after_hashes(completion)
    number = parse_number(answer)
    if number is None:
        lines = completion.strip().splitlines() or [""]
        return _plain(lines[-1] if given is None else given) == _plain(answer)
    if given is None:
        return last_number(completion) == number
    if parse_number(given) is None:
        given = _UNIT.sub("", _ASSIGNMENT.sub("", _rewritten(given).strip().rstrip(".")))
    return parse_number(given) == number


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact value of a text that is one number, else None. A percent sign is dropped, as GSM8K does.

    >>> parse_number("$1,200.50"), parse_number("-\\frac{3}{4}"), parse_number("50%"), parse_number("5 or 6")
    (Fraction(2401, 2), Fraction(-3, 4), Fraction(50, 1), None)
    """
    if len(text) > _MAX_NUMBER_CHARACTERS:
        return None
    match = _NUMBER.fullmatch(_rewritten(text).strip().rstrip(".").removesuffix("%").strip())
    if match is None:
        return None
    numerator, denominator = Fraction(match[1]), Fraction(match[2] or 1)
    return None if denominator == 0 else numerator / denominator


def last_number(text: str) -> Fraction | None:
    """Return the last number in `text`; None when there is none, or it is too long to be an answer."""
    found = [match[0] for match in _NUMBER_IN_TEXT.finditer(_rewritten(text))]
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


def _last_answer_element(text: str) -> str | None:
    before, closing, _ = text.rpartition("</answer>")
    _, opening, content = before.rpartition("<answer>")
    return content.strip() if closing and opening else None


def _after_hashes(text: str) -> str | None:
    _, mark, tail = text.rpartition("####")
    lines = tail.strip().splitlines()
    return lines[0].strip() if mark and lines else None


def _rewritten(text: str) -> str:
    """Rewrite common LaTeX for numbers as plain text: fractions as a/b, no dollars, no thousands separators."""
    for pattern, replacement in _LATEX_REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _plain(text: str) -> str:
    """Reduce a text to what is compared: no capitals, no spaces, no final dot."""
    return "".join(_rewritten(text).split()).rstrip(".").casefold()
