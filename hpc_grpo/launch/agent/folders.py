"""The folders an attempt owns on a node: Ray's temp-dir and the weight store's shared memory.

Both lie where every user may make folders, so the attempt's tag in their names is one that nobody can guess: a folder
whose name is known beforehand can be made by somebody else first, and then this node has no run.

Each holds a file that its agent keeps locked. The kernel drops the lock with the process, however it died, so
an unlocked folder is a leftover: the next agent on the node removes it (a store can hold 100 GB of memory). Whose it is
and whether it is locked is asked of the opened folder, never of its name, which may come to mean another meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
from pathlib import Path

from hpc_grpo.errors import LaunchError

SHM = Path("/dev/shm")
_PREFIX = "hg-"
_LOCK_NAME = ".agent"
_MAX_LOG_BYTES = 32 * 2**20
"""A larger log of Ray is copied from its end only."""


class OwnedDir:
    """A new folder with mode 0700 that exists as long as this process holds its lock.

    Raises LaunchError where others could put their own in its place, and FileExistsError where something is there.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            elsewhere = "" if path.parent == SHM else ", or set launch.local_dir to another folder, such as /tmp"
            raise LaunchError(
                f"{path.parent} may be written by everybody and has no sticky bit (mode {stat.S_IMODE(mode):o}): "
                f"any user could replace a run's folders in it. Have chmod +t {path.parent} done{elsewhere}."
            )
        path.mkdir(mode=0o700)
        self.path = path
        try:
            self._lock = os.open(self.path / _LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, socket.gethostname().encode())
        except OSError:
            shutil.rmtree(self.path)  # a full disk: no later agent would know it for a leftover
            raise

    def remove(self) -> None:
        shutil.rmtree(self.path)
        os.close(self._lock)


def shm_dir_path(tag: str) -> Path:
    return SHM / f"{_PREFIX}{tag}"


def sweep(parent: Path) -> list[Path]:
    """Remove folders below `parent` whose agent of this user is dead, and that no other agent removes; returns them.

    Never raises: what it cannot open or remove is another user's, or gone, and is no reason not to start.
    """
    removed: list[Path] = []
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            if _sweep_one(path, opened):
                removed.append(path)
    return removed


def _sweep_one(path: Path, opened: contextlib.ExitStack) -> bool:
    folder = _opened(opened, path, os.O_RDONLY | os.O_DIRECTORY)
    if os.fstat(folder).st_uid != os.getuid():
        return False
    lock = _opened(opened, _LOCK_NAME, os.O_RDWR | os.O_NONBLOCK, folder)
    # Another node's folder, where /tmp is shared after all: its lock may not be seen from here.
    if os.read(lock, 256) != socket.gethostname().encode():
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept while removing: no two sweeps do it
    except BlockingIOError:
        return False
    shutil.rmtree(path)
    return True


def _opened(opened: contextlib.ExitStack, path: Path | str, flags: int, folder: int | None = None) -> int:
    """Open what is at `path` itself, no link to elsewhere; `opened` closes it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=folder)
    opened.callback(os.close, descriptor)
    return descriptor


def keep_ray_logs(temp_dir: Path, log_dir: Path) -> None:
    """Copy the logs of a Ray that has ended from its temp-dir, beside those of Rays before it in the same attempt."""
    logs = temp_dir / "session_latest" / "logs"
    if logs.is_dir():
        before = len(list(log_dir.glob("ray*/")))
        copy_logs(logs, log_dir / (f"ray-{before + 1}" if before else "ray"))


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
