"""Bring a set of machines up whole or not at all, and take it away: what is built on them says what that is."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from . import host, machine, namespaces
from .errors import MachineError
from .layout import Layout

_LOG_TAIL_LINES = 8


@contextmanager
def alone(layout: Layout) -> Iterator[None]:
    """Let one command at a time change the machines. The lock is the state folder, so it leaves no file."""
    while True:
        layout.state.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(layout.state, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Whoever held the lock may have been `down`, which deletes the folder.
            if layout.state.exists() and os.path.samestat(os.fstat(descriptor), layout.state.stat()):
                yield
                return
        finally:
            os.close(descriptor)


def bring_up(layout: Layout, build: Callable[[], None], shape: str, release: Callable[[], None] = lambda: None) -> None:
    """Build from an empty state folder and write `shape` when all is there. What fails leaves nothing behind.

    The caller has the lock. `release` takes away what lies outside the state folder, once no process is left.
    """
    _dismantle(layout, release)
    try:
        layout.marker.touch()
        build()
        layout.shape.write_text(shape)
    except BaseException as error:
        logs = _log_tails(layout) if isinstance(error, MachineError) else ""
        _dismantle(layout, release)
        layout.state.rmdir()
        if isinstance(error, MachineError):
            raise type(error)(f"{error}{logs}") from error
        raise


def take_down(layout: Layout, release: Callable[[], None] = lambda: None) -> bool:
    """Take the machines away. False where there was nothing."""
    host.require_root()
    if not layout.state.exists():
        return False
    with alone(layout):
        was_there = layout.marker.exists()
        _dismantle(layout, release)
        layout.state.rmdir()
    return was_there


def _dismantle(layout: Layout, release: Callable[[], None]) -> None:
    """Leave the state folder empty. Whatever an `up` that was cut short left, this takes away too."""
    if not layout.marker.exists():
        if any(layout.state.iterdir()):
            raise MachineError(f"{layout.state} holds files of somebody else: choose another folder")
        return
    for folder in layout.machine_dir("").glob("*"):
        machine.kill(layout, folder.name)
    release()
    for target in namespaces.mounts_below(layout.state):
        namespaces.unmount(target)
    for path in layout.state.iterdir():
        # The marker goes last, so that an interrupted `down` can be repeated.
        if path != layout.marker:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    layout.marker.unlink()


def _log_tails(layout: Layout) -> str:
    parts = []
    for path in sorted(layout.logs.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        parts.append("\n".join([f"\n--- {path.name}", *lines]))
    return "".join(parts)
