"""The folders an attempt has on a node: its own, Ray's temp-dir and the weight store's shared memory, and shared ones.

All lie where every user may make folders, so the attempt's tag in the names of its own is one that nobody can guess: a
folder whose name is known beforehand can be made by somebody else first, and then this node has no run. Shared ones
hold copies (stage.py), whose paths must be the same in every job; with such a name taken, there is no copy.

Each holds a file that its agents keep locked. The kernel drops the lock with the process, however it died, so
an unlocked folder is a leftover: the next agent on the node removes it (a store can hold 100 GB of memory). Whose it is
and whether it is locked is asked of the opened folder, never of its name, which may come to mean another meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from hpc_grpo.errors import LaunchError

SHM = Path("/dev/shm")
_PREFIX = "hg-"
_LOCK_NAME, _FILLED_NAME = ".agent", ".filled"
_MAX_LOG_BYTES = 32 * 2**20
"""A larger log of Ray is copied from its end only."""


class OwnedDir:
    """A new folder with mode 0700 that exists as long as this process holds its lock.

    Raises LaunchError where others could put their own in its place, and FileExistsError where something is there.
    """

    def __init__(self, path: Path) -> None:
        _prepare_parent(path.parent)
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
        _remove(self.path)
        os.close(self._lock)


class SharedDir:
    """A folder with mode 0700 for all agents of this user on the node: the first one fills it, it goes with the last.

    They hold its lock together; who fills or removes it holds it alone. Made by `shared_dir`.
    """

    def __init__(self, path: Path) -> None:
        """Open the folder, and make it where it is missing. Raises LaunchError where it is another user's."""
        self.path = path
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        with contextlib.ExitStack() as opened:
            folder = _opened(opened, path, os.O_RDONLY | os.O_DIRECTORY)
            if os.fstat(folder).st_uid != os.getuid():
                raise LaunchError(
                    f"{path} is another user's. Set launch.local_dir to a folder of your own on the node."
                )
            self._lock = os.open(_LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600, dir_fd=folder)

    def is_filled(self) -> bool:
        """Take part in a folder that is filled; False where it is not, or somebody is about to change that."""
        return self._takes(fcntl.LOCK_SH) and (self.path / _FILLED_NAME).exists()

    def fill(self, fill: Callable[[Path], bool]) -> bool:
        """Have `fill` put everything into the folder, where nobody else does; remove it where that fails.

        Returns False where others are at work, and where `fill` does.
        """
        if not self._takes(fcntl.LOCK_EX):
            return False
        os.pwrite(self._lock, socket.gethostname().encode(), 0)
        is_filled = False
        try:
            _empty(self.path)  # of what an agent left that was killed
            is_filled = fill(self.path)
            if is_filled:
                (self.path / _FILLED_NAME).touch()
        finally:
            if not is_filled:
                _take_away(self.path)
        return is_filled

    def leave(self) -> None:
        """Remove the folder, unless others are in it."""
        try:
            if self._takes(fcntl.LOCK_EX):
                _take_away(self.path)
        finally:
            self.close()

    def close(self) -> None:
        os.close(self._lock)

    def _takes(self, kind: int) -> bool:
        """Take the lock, and say whether the folder is still at its path."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._lock), (self.path / _LOCK_NAME).lstat())
        return False


def shared_dir(path: Path, fill: Callable[[Path], bool], goes_on: Callable[[], bool]) -> SharedDir | None:
    """Return the folder at `path` once it is filled, by `fill` where no other agent does it; None where it was ended.

    `fill` and `goes_on`, which waits a moment, are False then. Raises LaunchError for a name that another user has or
    may take, and what `fill` raises.
    """
    _prepare_parent(path.parent)
    while True:
        with contextlib.suppress(FileNotFoundError):  # the last agent in it has just removed it
            folder, is_filled = SharedDir(path), False
            try:
                is_filled = folder.is_filled() or (folder.fill(fill) and folder.is_filled())
            finally:
                if not is_filled:
                    folder.close()
            if is_filled:
                return folder
        if not goes_on():
            return None


def shared_dir_path(parent: Path, contents: str) -> Path:
    """Return the path, below `parent`, of this user's folder with such contents.

    >>> shared_dir_path(Path("/tmp"), "env") == shared_dir_path(Path("/tmp"), "env")
    True
    """
    return parent / f"{_PREFIX}{os.getuid()}-{hashlib.sha256(contents.encode()).hexdigest()[:12]}"


def _prepare_parent(parent: Path) -> None:
    """Make the folder of an agent's folders. Raises LaunchError where others could replace what is in it."""
    parent.mkdir(parents=True, exist_ok=True)
    mode = parent.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        elsewhere = "" if parent == SHM else ", or set launch.local_dir to another folder, such as /tmp"
        raise LaunchError(
            f"{parent} may be written by others and has no sticky bit (mode {stat.S_IMODE(mode):o}): they could "
            f"replace a run's folders in it. Have chmod +t {parent} done{elsewhere}."
        )


def _take_away(path: Path) -> None:
    """Remove a folder whose lock is held; from its name at once, so that who makes it anew finds nothing."""
    gone = path.with_name(f"{_PREFIX}{secrets.token_hex(8)}")
    path.rename(gone)
    try:
        _remove(gone)
    except OSError:  # an agent that came just then has put a lock into it
        _remove(gone)


def _remove(path: Path) -> None:
    """Remove a folder, its lock last: by it the next agent knows what one that is killed here has left."""
    _empty(path)
    shutil.rmtree(path)


def _empty(path: Path) -> None:
    """Remove all but the lock."""
    for entry in path.iterdir():
        if entry.name != _LOCK_NAME:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


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
    _take_away(path)
    return True


def _opened(opened: contextlib.ExitStack, path: Path | str, flags: int, folder: int | None = None) -> int:
    """Open what is at `path` itself, no link to elsewhere; `opened` closes it."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=folder)
    opened.callback(os.close, descriptor)
    return descriptor


def keep_ray_logs(temp_dir: Path, log_dir: Path) -> None:
    """Copy the logs of a Ray that has ended, beside those of Rays before it in the same attempt.

    They are in its temp-dir, and beside that: on the node, so that a shared disk that is full ends no Ray.
    """
    for log in temp_dir.parent.glob("*.log"):
        with log.open("rb") as reader, (log_dir / log.name).open("ab") as kept:
            shutil.copyfileobj(reader, kept)
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
