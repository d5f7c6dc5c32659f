"""Find what a log says last about why its process ended: pure functions of text."""

from __future__ import annotations

import re

_START = re.compile(
    r"^(?P<prefix>.*)Traceback \(most recent call last\)|^error: |^Fatal Python error: |^terminate called"
)
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?:\(\w+\))?(?:: |:?$)")
_STOP = re.compile(r"^Stopping after step ")
_MAX_MESSAGE_LINES = 30
_SHOWN_LINES = 12
_MAX_SENTENCE_CHARS = 300


def last_error(text: str) -> str:
    """Return the last traceback or `error:` message of a log, at most 12 lines of its end; "" if there is none.

    >>> last_error("step 1\\nerror: No data.\\n  in: d.jsonl\\nbye\\n")
    'error: No data.\\n  in: d.jsonl'
    """
    kept = _last_block(text)
    return "\n".join(["…", *kept[-_SHOWN_LINES:]] if len(kept) > _SHOWN_LINES else kept)


def last_error_in_a_line(text: str) -> str:
    """Return the last error of a log without its frames, in one line of at most 300 characters; "" if there is none.

    >>> last_error_in_a_line("Traceback (most recent call last):\\n  File a\\nValueError: no\\n  data.\\n\\nbye\\n")
    'ValueError: no data'
    """
    block = _last_block(text)
    if not block:
        return ""
    if block[0].startswith("Traceback"):
        block = _exception(block)
    printable = "".join(char if char.isprintable() else " " for char in " ".join(block).removeprefix("error: "))
    line = " ".join(printable.split()).rstrip(".")
    return line if len(line) <= _MAX_SENTENCE_CHARS else f"{line[: _MAX_SENTENCE_CHARS - 1]}…"


def reason_to_stop(text: str) -> str:
    """Return the driver's line that says why it stopped early; "" if it did not say."""
    said = [line for line in text.splitlines() if _STOP.match(line)]
    return said[-1] if said else ""


def _last_block(text: str) -> list[str]:
    lines = text.splitlines()
    starts = [(index, match) for index, line in enumerate(lines) if (match := _START.match(line))]
    if not starts:
        return []
    index, match = starts[-1]
    prefix = match["prefix"] or ""
    block = [line.removeprefix(prefix) for line in lines[index:]]
    is_traceback = match["prefix"] is not None
    return _traceback(block) if is_traceback else _message(block)


def _exception(traceback: list[str]) -> list[str]:
    """Return the lines from the last exception on: Ray's message holds that of another process before it."""
    begins = [index for index, line in enumerate(traceback) if index and line[:1].strip()]
    named = [index for index in begins if _EXCEPTION.match(traceback[index])]
    start = named[-1] if named else next(iter(begins), len(traceback))
    return traceback[start:]


def _message(block: list[str]) -> list[str]:
    """Return the first line and the indented ones that go on with it."""
    end = next((i for i, line in enumerate(block) if i and not line.startswith((" ", "\t"))), len(block))
    return block[: min(end, _MAX_MESSAGE_LINES)]


def _traceback(block: list[str]) -> list[str]:
    """Return frames, exception and the further lines of its message (Ray's holds another process's traceback)."""
    first = next((i for i, line in enumerate(block) if i and line.strip() and not line.startswith((" ", "\t"))), None)
    if first is None:
        return block
    rest = block[first + 1 :][:_MAX_MESSAGE_LINES]
    end = next((i for i, line in enumerate(rest) if not line.strip()), len(rest))
    return block[: first + 1 + end]
