"""Find the last error in a log: pure functions of text."""

from __future__ import annotations

import re

_START = re.compile(
    r"^(?P<prefix>.*)Traceback \(most recent call last\)|^error: |^Fatal Python error: |^terminate called"
)
_EXCEPTION = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?:\(\w+\))?(?:: |:?$)")
_MAX_MESSAGE_LINES = 30
_SHOWN_LINES = 12
_MAX_SENTENCE_CHARS = 300


def last_error(text: str) -> str:
    """Return the last traceback or `error:` message of a log, at most its last 12 lines; "" without one.

    >>> last_error("step 1\\nerror: No data.\\n  in: d.jsonl\\nbye\\n")
    'error: No data.\\n  in: d.jsonl'
    """
    kept = _last_block(text)
    return "\n".join(["…", *kept[-_SHOWN_LINES:]] if len(kept) > _SHOWN_LINES else kept)


def last_error_in_a_line(text: str) -> str:
    """Return the last error of a log without frames, in one line of at most 300 characters; "" without one.

    >>> last_error_in_a_line("Traceback (most recent call last):\\n  File a\\nValueError: no\\n  data.\\n\\nbye\\n")
    'ValueError: no data'
    """
    block = _last_block(text)
    if block and block[0].startswith("Traceback"):
        # Start at the last exception: Ray's message includes another process's exception before it.
        begins = [index for index, line in enumerate(block) if index and line[:1].strip()]
        named = [index for index in begins if _EXCEPTION.match(block[index])]
        block = block[named[-1] if named else next(iter(begins), len(block)) :]
    printable = "".join(char if char.isprintable() else " " for char in " ".join(block).removeprefix("error: "))
    line = " ".join(printable.split()).rstrip(".")
    return line if len(line) <= _MAX_SENTENCE_CHARS else f"{line[: _MAX_SENTENCE_CHARS - 1]}…"


def reason_to_stop(text: str) -> str:
    """Return the line in which the driver says why it stopped early, "" without one."""
    return next((line for line in reversed(text.splitlines()) if line.startswith("Stopping after step ")), "")


def _last_block(text: str) -> list[str]:
    """Return the lines of the last error: its first line, frames, exception, and the rest of the message."""
    lines = text.splitlines()
    starts = [(index, match) for index, line in enumerate(lines) if (match := _START.match(line))]
    if not starts:
        return []
    index, match = starts[-1]
    block = [line.removeprefix(match["prefix"] or "") for line in lines[index:]]
    is_indented = [not line.strip() or line.startswith((" ", "\t")) for line in block]
    if match["prefix"] is None:
        end = next((i for i, line in enumerate(block) if i and not line.startswith((" ", "\t"))), len(block))
        return block[: min(end, _MAX_MESSAGE_LINES)]
    exception = next((i for i, indented in enumerate(is_indented) if i and not indented), len(block))
    rest = block[exception + 1 :][:_MAX_MESSAGE_LINES]  # Ray's message holds another process's traceback
    end = next((i for i, line in enumerate(rest) if not line.strip()), len(rest))
    return block[: exception + 1 + end]
