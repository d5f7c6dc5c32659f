"""The output of another program on its way to a terminal and a log: drawing passes, acting on the terminal does not."""

from __future__ import annotations

import codecs
import re

from hpc_grpo.system.readable import printable

_DRAWING = re.compile(r"(\r|\x1b\[(?:[0-9;]{0,32}[A-HJKm]|\?25[hl]))")
"""Colours, the cursor's moves, erasing, hiding the cursor: what a live panel is drawn with."""

_UNFINISHED = re.compile(r"(\r|\x1b(\[[0-9;?]{0,32})?)\Z")


class ForeignOutput:
    """Takes a program's bytes as they come, in any pieces."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def take(self, data: bytes, final: bool = False) -> str:
        """Return the text that is whole by now; an escape sequence that is cut waits for its rest."""
        text = self._held + self._decoder.decode(data, final)
        cut = None if final else _UNFINISHED.search(text)
        self._held = cut[0] if cut else ""
        return text[: cut.start()] if cut else text


def drawn(text: str) -> str:
    """Return what a terminal may be given of a program's output.

    >>> drawn("\\x1b[1mbold\\x1b[0m \\x1b]0;title\\x07")
    '\\x1b[1mbold\\x1b[0m \\\\x1b]0;title\\\\x07'
    """
    pieces = _DRAWING.split(text.replace("\r\n", "\n"))
    return "".join(piece if index % 2 else printable(piece) for index, piece in enumerate(pieces))


def undrawn(text: str) -> str:
    """Return what a file is given of it: no drawing either, and what was drawn over on a line of its own.

    >>> undrawn("\\x1b[1mbold\\x1b[0m 10 %\\r20 %\\r\\n")
    'bold 10 %\\n20 %\\n'
    """
    lines = re.sub(r"\r+(\n|(?=\x1b))", r"\1", text)
    return printable(_DRAWING.sub(lambda found: "\n" if found[0] == "\r" else "", lines))
