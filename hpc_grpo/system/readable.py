"""Format times, numbers and tables for people. An unknown value is "-".

The table is our own: importing rich takes 40 ms, a third of the time of `hpc-grpo status`.
"""

from __future__ import annotations

import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

UNKNOWN = "-"

_UNPRINTABLE = re.compile(
    # A joiner after a letter of a joining script or after an emoji, and an emoji's style: one of each is allowed.
    "(?<=[\u0600-\u0dff\u2190-\u21ff\u2300-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff])(?:\ufe0f\u200d?|[\u200c\u200d])|"
    # Control characters except tab and line feed, ends of lines and paragraphs, and halves of surrogate pairs.
    "([\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    # Default_Ignorable_Code_Point of Unicode 16: invisible characters. Annotation characters, which can hide text.
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff])"
)
_LONGEST_LINE = 20_000
"""Characters of the longest printed line. A terminal needs minutes for a line of megabytes."""

_LINE_WIDTH = 100


def printable(text: str, longest_line: int | None = _LONGEST_LINE) -> str:
    r"""Escape the characters with which a text could control a terminal or look like another text. Cut endless lines.

    Use it for all text from others: completions, data, errors of rewards, logs, names. Keeps lines and tabs.

    >>> print(printable("right \x1b]52;c;ZXZpbA==\x07 \u202egnp.exe"))
    right \x1b]52;c;ZXZpbA==\x07 \u202egnp.exe
    """

    def spelled(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        code = ord(found[1])
        return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"

    text = _UNPRINTABLE.sub(spelled, text.replace("\r\n", "\n"))
    if longest_line is None or len(text) <= longest_line:
        return text
    return "\n".join(
        line if len(line) <= longest_line else f"{line[:longest_line]}… ({len(line) - longest_line:,} more)"
        for line in text.split("\n")
    )


def duration(seconds: float | None) -> str:
    """Return the two largest units of a duration.

    >>> [duration(s) for s in (7.6, 754, 7_400, 273_700, None)]
    ['7 s', '12 min 34 s', '2 h 03 min', '3 d 04 h', '-']
    """
    if seconds is None:
        return UNKNOWN
    whole = int(max(0.0, seconds))
    for unit_s, unit, part_s, part in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s:02} {part}"
    return f"{whole} s"


def clock(seconds: float) -> str:
    """Return a duration to the second, in the width of a log line.

    >>> clock(130), clock(90_061)
    ('0:02:10', '1d 1:01:01')
    """
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    time_of_day = f"{hours}:{minutes:02}:{rest_s:02}"
    return f"{days}d {time_of_day}" if days else time_of_day


def moment(unix_s: float | None) -> str:
    """Return a unix time on this machine's clock, to the minute."""
    return UNKNOWN if unix_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def fraction(value: int | None, total: int | None) -> str:
    """Return `value` of `total`.

    >>> fraction(40, 95), fraction(None, None)
    ('40/95', '-')
    """
    return UNKNOWN if value is None else f"{value}/{UNKNOWN if total is None else total}"


def counted(number: int, noun: str) -> str:
    """Return a number of things.

    >>> counted(1, "node"), counted(1200, "step")
    ('1 node', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def number_or_none(value: Any) -> float | None:
    """Return a file's value as a number; None if it is not one. JSON integers are unlimited, floats are not."""
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def finite_or_none(value: Any) -> float | None:
    """Return a file's value as a finite number; None if it is not one."""
    number = value if type(value) is float else number_or_none(value)
    return number if number is not None and math.isfinite(number) else None


def for_json(value: Any, spell: Callable[[str], str] = str) -> Any:
    """Return values as JSON holds them: numbers that are not finite become None. `spell` writes each text."""
    if isinstance(value, str):
        return spell(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {spell(str(key)): for_json(item, spell) for key, item in value.items()}
    return [for_json(item, spell) for item in value] if isinstance(value, list | tuple) else value


def decimal(value: float | None) -> str:
    """Return a number with three decimals."""
    return UNKNOWN if value is None else f"{value:.3f}"


def short_number(value: float | None) -> str:
    """Return a number with two or three digits, and a letter for thousands.

    >>> [short_number(n) for n in (7, 950, 1234, 56_789, 1.2e6, None)]
    ['7', '950', '1.2k', '57k', '1.2M', '-']
    """
    if value is None:
        return UNKNOWN
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            scaled = value / factor
            return f"{scaled:.1f}{suffix}" if scaled < 10 else f"{scaled:.0f}{suffix}"
    return f"{value:.0f}"


def file_size(num_bytes: int) -> str:
    """Return a number of bytes in the largest binary unit.

    >>> file_size(512), file_size(3 << 30)
    ('512 B', '3.0 GiB')
    """
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes} B"


def one_line(text: str | None, width: int | None = None) -> str:
    """Return `text` without line breaks, cut to `width` characters.

    >>> one_line("It crashed;\\n  see driver.log", 15)
    'It crashed; se…'
    """
    line = printable(" ".join((text or UNKNOWN).split()))
    return line if width is None or len(line) <= width else f"{line[: width - 1]}…"


def wrapped(text: str) -> list[str]:
    """Return the lines of a paragraph for a terminal."""
    return textwrap.wrap(text, _LINE_WIDTH)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of text, two spaces apart."""
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
