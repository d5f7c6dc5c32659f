"""The processes below this one: find them and their sockets, end them, reap them.

Kills only by the id of a process that this one started, or of a descendant.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import psutil

_LISTENS = "0A"


def descendants(root: int, depth: float = math.inf) -> list[int]:
    """Return the living processes below `root`, without `root`, down to `depth`. Parents come before their children."""
    children: dict[int, list[int]] = {}
    # Not psutil's children(): it fails if a site hides other users' processes (hidepid).
    for process in psutil.process_iter(["ppid", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE:
            children.setdefault(process.info["ppid"], []).append(process.pid)
    found: list[int] = []
    generation = [root]
    while generation and depth > 0:
        generation = [child for parent in generation for child in children.get(parent, [])]
        found += generation
        depth -= 1
    return found


def session_members(session: int) -> list[int]:
    """Return the living processes of a session started with `start_new_session=True`; its id is the leader's pid."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if os.getsid(pid) == session and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def end_processes(find: Callable[[], list[int]], grace_s: float) -> None:
    """Send SIGTERM to the processes of `find`, and SIGKILL to the rest after `grace_s`."""
    signal_all(find(), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.05)
    deadline = time.monotonic() + 5.0
    while left and time.monotonic() < deadline:
        signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
        left = find()


def reap_adopted(keep: Collection[int]) -> None:
    """Reap ended children. Stop at the first one in `keep`: its Popen waits for it."""
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        while (ended := os.waitid(os.P_ALL, 0, peek)) is not None and ended.si_pid not in keep:
            os.waitpid(ended.si_pid, os.WNOHANG)
    except ChildProcessError:
        return  # no child is left, or another Popen object has reaped it


def signal_all(pids: Iterable[int], sig: int) -> None:
    """Send a signal to the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)


def listeners(port: int) -> dict[int, int]:
    """Return the sockets that listen on a TCP port, on any address: inode -> user. Linux only."""
    found: dict[int, int] = {}
    for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")):
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, _, state, _, _, _, user, _, inode, *_ in (row.split() for row in rows):
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                found[int(inode)] = int(user)
    return found


def holders(inodes: Iterable[int], pids: Iterable[int]) -> dict[int, list[int]]:
    """Return which processes hold which of the sockets: inode -> pids."""
    names = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, list[int]] = {inode: [] for inode in names.values()}
    for pid in pids if names else ():
        with contextlib.suppress(OSError):  # a process that has ended, or another user's
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (inode := names.get(str(descriptor.readlink()))) is not None:
                        found[inode].append(pid)
    return found
