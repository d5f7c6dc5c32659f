"""Times and numbers as people read them, and tables of text; an unknown value is "-"."""

from __future__ import annotations

import time
from collections.abc import Sequence

from hpc_grpo.metrics.console_lines import short_number

UNKNOWN = "-"


def duration(seconds: float | None) -> str:
    """The two largest units of a duration in seconds.

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


def moment(unix_s: float | None) -> str:
    """A unix time on this machine's clock, to the minute."""
    return UNKNOWN if unix_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def share(value: int | None, total: int | None) -> str:
    """
    >>> share(40, 95), share(None, None)
    ('40/95', '-')
    """
    return UNKNOWN if value is None else f"{value}/{UNKNOWN if total is None else total}"


def decimal(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3f}"


def short(value: float | None) -> str:
    return UNKNOWN if value is None else short_number(value)


def one_line(text: str | None, width: int | None = None) -> str:
    """`text` without line breaks, cut to `width` characters.

    >>> one_line("It crashed;\\n  see driver.log", 15)
    'It crashed; se…'
    """
    line = " ".join((text or UNKNOWN).split())
    return line if width is None or len(line) <= width else f"{line[: width - 1]}…"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, two spaces apart."""
    lines = [titles, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
