"""The Linux calls behind a machine. Python has unshare and setns only from 3.12 on, and mount never."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_PR_SET_PDEATHSIG = 1


_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(descriptor: int) -> None:
    _check(_libc.setns(ctypes.c_int(descriptor), ctypes.c_int(0)), "setns")


def _mount(source: str, target: Path, kind: str | None, flags: int, data: str | None = None) -> None:
    result = _libc.mount(
        source.encode(),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _check(result, f"mount {source} on {target}")


def make_mounts_private() -> None:
    """Nothing mounted from here on is seen outside, nor the other way round."""
    _mount("none", Path("/"), None, _MS_REC | _MS_PRIVATE)


def bind(source: Path, target: Path) -> None:
    """Show `source`, and what is mounted below it, at `target`."""
    _mount(str(source), target, None, _MS_BIND | _MS_REC)


def mount_tmpfs(target: Path, size_mib: int, mode: str) -> None:
    _mount("tmpfs", target, "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size_mib}m,mode={mode}")


def mount_proc() -> None:
    _mount("proc", Path("/proc"), "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def mounts_below(folder: Path) -> list[Path]:
    """Return the mount points inside `folder`, the newest first: the order in which they can be taken away."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        # Field 5 is the mount point, with blanks written in octal.
        target = Path(line.split()[4].encode().decode("unicode_escape"))
        if target.is_relative_to(folder):
            found.append(target)
    return found[::-1]


def unmount(target: Path) -> None:
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(_MNT_DETACH)), f"unmount {target}")


def create_network_namespace(path: Path) -> None:
    """Make a network that lives until `path` is unmounted, with or without a process in it."""
    path.touch()
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    try:
        unshare(CLONE_NEWNET)
        try:
            bind(Path("/proc/self/ns/net"), path)
        finally:
            setns(own)
    finally:
        os.close(own)


@contextmanager
def pid_namespace_for_children(descriptor: int | None) -> Iterator[None]:
    """Inside the block, children start in the PID space of `descriptor`, or in a new one where it is None."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        if descriptor is None:
            unshare(CLONE_NEWPID)
        else:
            setns(descriptor)
        try:
            yield
        finally:
            setns(own)
    finally:
        os.close(own)


def signal_on_parent_death(signal_number: int) -> None:
    _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0), "prctl")
