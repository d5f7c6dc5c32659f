"""Tell the user, where that must not cost the run: a full disk below the job's output ends no healthy attempt.

What is told may hold what others wrote, so it is made printable here: on a terminal, text is also commands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TextIO

from hpc_grpo.system.readable import printable


def say(text: str, stream: TextIO | None = None) -> None:
    """Print to `stream`, by default stdout; characters that it does not have, or should not get, are spelled out."""
    text = printable(text)
    with contextlib.suppress(OSError):
        try:
            print(text, file=stream, flush=True)
        except UnicodeEncodeError:
            print(ascii(text), file=stream, flush=True)


@contextlib.contextmanager
def not_worth_the_run(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Go on after an OSError in the block, and say what could not be done."""
    try:
        yield
    except OSError as error:
        say(f"{what}: {error}", stream)
