"""The folders an attempt owns on a node: Ray's temp-dir and the weight store's shared memory.

Each holds a file that its agent keeps locked. The kernel drops the lock with the process, however it died, so
an unlocked folder is a leftover: the next agent on the node removes it (a store can hold 100 GB of memory).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path

SHM = Path("/dev/shm")
_PREFIX = "hg-"
_LOCK_NAME = ".agent"
_MAX_LOG_BYTES = 32 * 2**20
"""A larger log of Ray is copied from its end only."""


class OwnedDir:
    """A folder with mode 0700 that exists as long as this process holds its lock."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True)
        self.path = path
        try:
            self._lock = os.open(path / _LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, socket.gethostname().encode())
        except OSError:
            shutil.rmtree(path)  # a full disk: no later agent would know it for a leftover
            raise

    def remove(self) -> None:
        shutil.rmtree(self.path)
        os.close(self._lock)


def shm_dir_path(tag: str) -> Path:
    return SHM / f"{_PREFIX}{tag}"


def sweep(parent: Path) -> list[Path]:
    """Remove folders below `parent` whose agent of this user is dead, and that no other agent removes; returns them."""
    removed: list[Path] = []
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # gone meanwhile: its own agent, or another sweep
            if _sweep_one(path):
                removed.append(path)
    return removed


def _sweep_one(path: Path) -> bool:
    if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
        return False
    lock = path / _LOCK_NAME
    # Another node's folder, where /tmp is shared after all: its lock may not be seen from here.
    if not lock.exists() or lock.read_text() != socket.gethostname():
        return False
    descriptor = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept while removing: no two sweeps do it
        shutil.rmtree(path)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def copy_logs(source: Path, target: Path) -> None:
    """Copy the non-empty files of Ray's log folder; of a huge one only the end."""
    for path in source.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.stat().st_size == 0:
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as reader, copy.open("wb") as writer:
            reader.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
            shutil.copyfileobj(reader, writer)
