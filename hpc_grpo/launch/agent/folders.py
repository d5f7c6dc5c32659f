"""The folders of an attempt on a node: its own, Ray's temp-dir, the weight store's shared memory, and shared copies.

All are in folders where every user may create folders. The names of an attempt's own folders contain its tag, which
nobody can guess: another user could create a folder with a known name first. Shared folders hold copies (stage.py),
whose paths must be the same in every job. If another user has taken the name of a shared folder, LaunchError is raised.

Each folder holds a file that its agents keep locked. The kernel drops the lock of a dead process. So an unlocked folder
is a leftover. The next agent on the node removes it, because a store can hold 100 GB of memory. Owner and lock are
checked on the opened folder, never by its name, which may be reused for another folder.
"""

from __future__ import annotations

import contextlib
import errno
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
_LOCK_NAME = ".agent"
_MAX_LOG_BYTES = 32 * 2**20  # only the end of a larger log of Ray is copied


class OwnedDir:
    """A new folder with mode 0700 that exists while this process holds its lock.

    Raises LaunchError if others could replace it, and FileExistsError if the name is taken.
    """

    def __init__(self, path: Path) -> None:
        self.path, parent = path, path.parent
        parent.mkdir(parents=True, exist_ok=True)
        mode = parent.stat().st_mode
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
            elsewhere = "" if parent == SHM else ", or set launch.local_dir to another folder, such as /tmp"
            raise LaunchError(
                f"{parent} may be written by others and has no sticky bit (mode {stat.S_IMODE(mode):o}): they could "
                f"replace a run's folders in it. Run chmod +t {parent}, or have its owner run it{elsewhere}."
            )
        path.mkdir(mode=0o700)
        try:
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            _keep_from_cleaners(self._folder)
            self._lock = os.open(self.path / _LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.write(self._lock, socket.gethostname().encode())
        except OSError:
            shutil.rmtree(self.path)  # Remove it now: later agents recognize leftovers only by their lock file.
            raise

    def remove(self) -> None:
        """Remove the folder, unless it was renamed, and release its lock."""
        with contextlib.suppress(FileNotFoundError):
            _remove(self.path)
        os.close(self._lock)
        os.close(self._folder)


class SharedDir:
    """A folder with mode 0700 for all agents of this user on the node. The last of them removes it.

    Agents share its lock; an agent that removes the folder locks it exclusively. `shared_dir` creates it.
    """

    def __init__(self, path: Path) -> None:
        """Open and lock the folder. Raises FileNotFoundError if it does not exist or is being removed.

        Raises LaunchError for another user's folder, and for a folder in use that lost its lock file.
        """
        self.path = path
        with contextlib.ExitStack() as opened:
            folder = _opened(opened, path, os.O_RDONLY | os.O_DIRECTORY)
            if os.fstat(folder).st_uid != os.getuid():
                raise LaunchError(
                    f"{path} is another user's. Set launch.local_dir to a folder of your own on the node."
                )
            try:
                self._lock = _opened(opened, _LOCK_NAME, os.O_RDWR, folder)
            except FileNotFoundError:
                _replace_torn(path, folder)
                raise
            _keep_from_cleaners(folder)
            self._open = opened.pop_all()
        if not self._takes(fcntl.LOCK_SH):  # another agent is removing it
            self.close()
            raise FileNotFoundError(path)

    def leave(self) -> None:
        """Release the folder. The last agent removes it."""
        try:
            if self._takes(fcntl.LOCK_EX):
                _take_away(self.path)
        finally:
            self.close()

    def close(self) -> None:
        self._open.close()

    def _takes(self, kind: int) -> bool:
        """Take the lock without waiting. Return False if another agent's lock forbids this, or the folder has moved."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, kind | fcntl.LOCK_NB)
            return os.path.samestat(os.fstat(self._lock), (self.path / _LOCK_NAME).lstat())
        return False


def shared_dir(path: Path, fill: Callable[[Path], bool]) -> SharedDir | None:
    """Return the folder at `path`, filled by `fill` if it does not exist; None if `fill` returns False.

    An agent fills its own folder and renames it, so a folder with this name is complete. Agents that start together
    each fill one, and all use the first. Raises LaunchError for another user's folder, and errors of `fill`.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            return SharedDir(path)
        own = OwnedDir(path.with_name(f"{_PREFIX}{secrets.token_hex(8)}"))
        try:
            if not fill(own.path):
                return None
            own.path.rename(path)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # another agent has created the folder meanwhile
                raise
        finally:
            own.remove()


def shared_dir_path(parent: Path, contents: str) -> Path:
    """Return the path, below `parent`, of this user's shared folder for `contents`.

    >>> shared_dir_path(Path("/tmp"), "env") == shared_dir_path(Path("/tmp"), "env")
    True
    """
    return parent / f"{_PREFIX}{os.getuid()}-{hashlib.sha256(contents.encode()).hexdigest()[:12]}"


def _take_away(path: Path) -> None:
    """Remove a locked folder. Rename it first, so that another agent can create the name again."""
    _remove(path.rename(path.with_name(f"{_PREFIX}{secrets.token_hex(8)}")))


def _replace_torn(path: Path, folder: int) -> None:
    """Remove a shared folder whose lock file a cleaner deleted. Raises LaunchError if the folder is in use."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # only one of several agents does this
    except BlockingIOError:
        raise LaunchError(f"{path} is in use and lacks its file {_LOCK_NAME}. Remove it once no job uses it.") from None
    if os.path.samestat(os.fstat(folder), path.lstat()):
        _take_away(path)


def _keep_from_cleaners(folder: int) -> None:
    """Lock a folder against systemd-tmpfiles, which removes files older than ten days but skips locked folders."""
    with contextlib.suppress(BlockingIOError):  # systemd-tmpfiles has locked the folder now
        fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove(path: Path) -> None:
    """Remove a folder, its lock last: by the lock, the next agent recognizes the leftovers of a killed agent."""
    for entry in path.iterdir():
        if entry.name != _LOCK_NAME:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.rmtree(path)


def shm_dir_path(tag: str) -> Path:
    return SHM / f"{_PREFIX}{tag}"


def sweep(parent: Path) -> list[Path]:
    """Remove this user's folders below `parent` whose agents are dead, and return them. Never raises."""
    removed: list[Path] = []
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:  # another user's, or gone
            folder = _opened(opened, path, os.O_RDONLY | os.O_DIRECTORY)
            if os.fstat(folder).st_uid != os.getuid():
                continue
            lock = _opened(opened, _LOCK_NAME, os.O_RDWR | os.O_NONBLOCK, folder)
            # Skip another node's folder if /tmp is shared: its lock may not be visible on this node.
            if os.read(lock, 256) == socket.gethostname().encode():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises OSError if the folder's agent lives
                _take_away(path)
                removed.append(path)
    return removed


def _opened(opened: contextlib.ExitStack, path: Path | str, flags: int, folder: int | None = None) -> int:
    descriptor = os.open(path, flags | os.O_NOFOLLOW, dir_fd=folder)
    opened.callback(os.close, descriptor)
    return descriptor


def keep_ray_logs(temp_dir: Path, log_dir: Path) -> None:
    """Copy the logs of a Ray that has ended to `log_dir`, beside the logs of earlier Rays.

    Ray writes its logs in its temp-dir and beside it, on the node: a full shared disk must not end Ray.
    """
    for log in temp_dir.parent.glob("*.log"):
        with log.open("rb") as reader, (log_dir / log.name).open("ab") as kept:
            shutil.copyfileobj(reader, kept)
    logs = temp_dir / "session_latest" / "logs"
    if logs.is_dir():
        before = len(list(log_dir.glob("ray*/")))
        copy_logs(logs, log_dir / (f"ray-{before + 1}" if before else "ray"))


def copy_logs(source: Path, target: Path) -> None:
    """Copy the non-empty files of Ray's log folder. Of a file above 32 MiB, copy only the end."""
    for path in source.rglob("*"):
        if path.is_symlink() or not path.is_file() or path.stat().st_size == 0:
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as reader, copy.open("wb") as writer:
            reader.seek(max(0, path.stat().st_size - _MAX_LOG_BYTES))
            shutil.copyfileobj(reader, writer)
