"""Print for the user: lines that must not fail the run, and another program's output.

Printed text may come from others, so it is escaped here: on a terminal, text can contain commands.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Iterator
from typing import TextIO

from hpc_grpo.system.readable import printable

_DRAWING = re.compile(r"(\r|\x1b\[(?:[0-9;]{0,32}[A-HJKm]|\?25[hl]))")
"""Drawing commands of a progress bar: colours, cursor moves, erasing, hiding the cursor."""

_UNFINISHED = re.compile(r"(\r|\x1b(\[[0-9;?]{0,32})?)\Z")


def say(text: str, stream: TextIO | None = None) -> None:
    """Print to `stream`, by default stdout. Works on a full disk, and with an encoding that lacks characters."""
    text = printable(text)
    with contextlib.suppress(OSError):
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            print(ascii(text), file=stream, flush=True)


@contextlib.contextmanager
def not_worth_the_run(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Continue after an OSError in the block, and print what failed."""
    try:
        yield
    except OSError as error:
        say(f"{what}: {error}", stream)


class ForeignOutput:
    """Decodes a program's output, which may arrive in pieces of any length."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def take(self, data: bytes, final: bool = False) -> str:
        """Return the complete text so far. An incomplete escape sequence waits for its rest."""
        text = self._held + self._decoder.decode(data, final)
        cut = None if final else _UNFINISHED.search(text)
        self._held = cut[0] if cut else ""
        return text[: cut.start()] if cut else text


def undrawn(text: str) -> str:
    """Return a program's output without drawing. Each version of a redrawn line becomes a line.

    >>> undrawn("\\x1b[1mbold\\x1b[0m 10 %\\r20 %\\r\\n")
    'bold 10 %\\n20 %\\n'
    """
    lines = re.sub(r"\r+(\n|(?=\x1b))", r"\1", text)
    return printable(_DRAWING.sub(lambda found: "\n" if found[0] == "\r" else "", lines))
