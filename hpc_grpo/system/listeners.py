"""Say who listens on a port of this machine, by the kernel's tables: Linux only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def listeners(port: int) -> dict[int, int]:
    """Return the sockets that listen on a TCP port, whatever their address: inode -> user."""
    found: dict[int, int] = {}
    for table in map(Path, _TABLES):
        rows = table.read_text().splitlines()[1:] if table.exists() else []
        for _, local, _, state, _, _, _, user, _, inode, *_ in (row.split() for row in rows):
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                found[int(inode)] = int(user)
    return found


def holders(inodes: Iterable[int], pids: Iterable[int]) -> dict[int, list[int]]:
    """Return which of the processes hold which of the sockets: inode -> pids."""
    names = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, list[int]] = {inode: [] for inode in names.values()}
    for pid in pids if names else ():
        with contextlib.suppress(OSError):  # a process that has ended, or another user's
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if (inode := names.get(str(descriptor.readlink()))) is not None:
                        found[inode].append(pid)
    return found
