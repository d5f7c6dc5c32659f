"""The processes below this one: find them, end them, collect what is left of them.

Every kill is by the id of a process this one started, or of a descendant of it. The process table is psutil's.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable

import psutil


def descendants(root: int, depth: float = math.inf) -> list[int]:
    """Return the living processes below `root`, without it, down to `depth`; parents come before their children."""
    children: dict[int, list[int]] = {}
    # Not psutil's children(): it fails where a site hides the processes of others (hidepid).
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
    return [pid for pid in psutil.pids() if _session_of(pid) == session and not _is_zombie(pid)]


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


def reap_adopted(keep: Collection[int]) -> None:
    """Reap ended children; stop at the first one in `keep`, since its Popen waits for it."""
    peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
    try:
        while (ended := os.waitid(os.P_ALL, 0, peek)) is not None and ended.si_pid not in keep:
            os.waitpid(ended.si_pid, os.WNOHANG)
    except ChildProcessError:
        return  # no child is left, or a Popen object elsewhere was faster


def _signal_all(pids: Iterable[int], sig: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, sig)
        except ProcessLookupError:
            continue


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
