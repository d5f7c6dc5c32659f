r"""Compares answers in mathematical notation by math-verify: `\sqrt{8}` and `2\sqrt{2}`, sets, intervals, matrices.

A simplification may run forever, or fill the memory, so `scoring` limits each completion. math-verify's own deadline is
an alarm. Python handles an alarm only between two bytecodes, so never inside a power of huge integers.
"""

from __future__ import annotations

import logging
import re

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_MAX_CHARACTERS = 1000
"""Longer answers are never equal: time and stack of parsing grow with the length."""

_FROM_NOTATION = (LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig())

_ROOT = re.compile(r"\u221a\s*(\([^()]*\)|\w+)")
_NEGATIVE_POWER = re.compile(r"\^(-\d+)")
_WITHOUT_LEFT = re.compile(r"^\s*(?=\\(?:neq?|[lg](?:eq?|eqslant|eqq|t))\b|[\u2260\u2264\u2265])")
"""The start of a relation without its left side. Such a relation equals its right side for math-verify."""
_SIGNS = str.maketrans({"\u221e": r"\infty ", "\u00b7": r"\cdot "})

# math-verify warns that its alarm is off. `scoring` limits the time instead.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def are_equal(given: str, answer: str) -> bool:
    """Return whether `given` equals `answer`; False if either is no mathematics."""
    if max(len(given), len(answer)) > _MAX_CHARACTERS:
        return False
    # Parse both as notation, even without dollars. A box has been removed already.
    found = parse(_as_notation(given), _FROM_NOTATION, parsing_timeout=None)
    wanted = parse(_as_notation(answer), _FROM_NOTATION, parsing_timeout=None)
    return bool(verify(wanted, found, timeout_seconds=None))


def _as_notation(text: str) -> str:
    text = _ROOT.sub(r"\\sqrt{\1}", _NEGATIVE_POWER.sub(r"^{\1}", text)).translate(_SIGNS)
    text = _WITHOUT_LEFT.sub("x", text.replace(r"\varnothing", r"\emptyset"))
    return text if "$" in text or "\\(" in text or "\\[" in text else f"${text}$"
