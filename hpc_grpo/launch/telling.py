"""Telling the user, where that must not cost the run: a full disk below the job's output ends no healthy attempt."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, flush=True)


@contextlib.contextmanager
def not_worth_the_run(what: str) -> Iterator[None]:
    """Go on after an OSError in the block, and say what could not be done."""
    try:
        yield
    except OSError as error:
        say(f"{what}: {error}")
