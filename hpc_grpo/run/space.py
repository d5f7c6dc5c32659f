"""A disk that is full for a while pauses the run instead of ending it: what was trained is not thrown away."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_RETRY_S = 2.0
_HEADROOM = 1.1


def when_there_is_space(write: Callable[[], T], what: str) -> T:
    """Run `write`, again and again while it fails for want of space; it must be fit to be repeated.

    Other errors are raised. For writes of this process alone: a collective of several must not fail half-way, see
    `wait_for_space`.
    """
    told = False
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in _FULL:
                raise
            told = told or _tell(f"{os.strerror(error.errno)}: {what} cannot be written")
        time.sleep(_RETRY_S)


def wait_for_space(folder: Path, num_bytes: int, what: str) -> None:
    """Return once the file system of `folder` has room for `num_bytes` and a little more."""
    told = False
    while (free := shutil.disk_usage(folder).free) < num_bytes * _HEADROOM:
        told = told or _tell(f"{what} needs {num_bytes / 2**30:.2f} GiB in {folder}, where {free / 2**30:.2f} are free")
        time.sleep(_RETRY_S)


def _tell(problem: str) -> bool:
    print(f"{problem}. The run waits for space; free some, and it goes on.", flush=True)
    return True
