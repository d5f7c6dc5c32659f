"""Starting and ending processes so that nothing outlives its parent and nothing else is touched.

Linux only. Every kill is by the id of a process this one started, or of a descendant of it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(sig: int = signal.SIGTERM) -> Callable[[], None]:
    """Return a `preexec_fn`: the child gets `sig` when the thread that starts it ends.

    Call Popen from the main thread: the kernel watches the starting thread, not the process.
    """
    parent = os.getpid()

    def preexec() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, sig)
        if os.getppid() != parent:  # the parent died before prctl
            os._exit(1)

    return preexec


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies, so that `descendants` sees them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_adopted(keep: Iterable[int]) -> None:
    """Collect exit statuses of adopted children; `keep` are those that a Popen object waits for."""
    kept = set(keep)
    for pid, (parent, _session) in _table(with_zombies=True).items():
        if parent == os.getpid() and pid not in kept:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue  # a Popen object elsewhere was faster


def descendants(root: int) -> list[int]:
    """Living processes below `root`, without it; parents come before their children."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _session) in _table().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def session_members(session: int) -> list[int]:
    """Living processes of a session started with `start_new_session=True` (its id is the leader's pid)."""
    return [pid for pid, (_parent, member_of) in _table().items() if member_of == session]


def end_processes(find: Callable[[], list[int]], grace_s: float) -> int:
    """SIGTERM what `find` returns, and SIGKILL what is left after `grace_s`; returns how many needed SIGKILL."""
    _signal_all(find(), signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline:
        if not find():
            return 0
        time.sleep(0.05)
    killed = find()
    deadline = time.monotonic() + 5.0
    while (left := find()) and time.monotonic() < deadline:
        _signal_all(left, signal.SIGKILL)
        time.sleep(0.05)
    return len(killed)


def start_time(pid: int) -> int:
    """When the process was started, in clock ticks since boot: with its id, a name no later process has.

    0 if it is gone, or another user's that the kernel hides.
    """
    stat = _read(Path(f"/proc/{pid}/stat"))
    if not stat:
        return 0
    state, *fields = stat.rpartition(b")")[2].split()
    return 0 if state == b"Z" else int(fields[18])


def catches(pid: int, sig: int) -> bool:
    """Whether the process has a handler for `sig`; without one the signal would kill it."""
    masks = [line.split()[1] for line in _read(Path(f"/proc/{pid}/status")).splitlines() if line.startswith(b"SigCgt:")]
    return any(int(mask, 16) >> (sig - 1) & 1 for mask in masks)


def _signal_all(pids: Iterable[int], sig: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def _table(with_zombies: bool = False) -> dict[int, tuple[int, int]]:
    """pid -> (parent, session) of every process that this user may see."""
    table: dict[int, tuple[int, int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        stat = _read(entry / "stat")
        if not stat:
            continue
        state, parent, _group, session = stat.rpartition(b")")[2].split()[:4]
        if with_zombies or state != b"Z":
            table[int(entry.name)] = (int(parent), int(session))
    return table


def _read(path: Path) -> bytes:
    """A file of /proc; empty for a process that is gone, or that a site's hidepid hides.

    Bytes, because the kernel cuts a process's name at 15 of them, also in the middle of a character.
    """
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
