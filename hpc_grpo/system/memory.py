"""Read how much memory this process may still take: the node's, or what the job's cgroup leaves of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")
_NAMES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Limit, usage and what the kernel gives back of it, by controller: "" is that of version 2."""


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    total: int
    available: int


def host_memory(own: Path = Path("/proc/self/cgroup"), root: Path = _CGROUPS) -> Memory:
    """Return the memory of the node or of the cgroup around this process, whichever has less left.

    Slurm bounds a job's memory by cgroups (`ConstrainRAMSpace`): the kernel ends who takes more, however much is free.
    """
    node = psutil.virtual_memory()
    found = [Memory(node.total, node.available)]
    for folder, names in _memory_cgroups(own, root):
        if (limited := _limited(folder, *names)) is not None:
            found.append(limited)
    return min(found, key=lambda memory: memory.available)


def _memory_cgroups(own: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the cgroup of this process and those around it; each of them may have a limit."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return  # a container without cgroups, or without /proc: the node's memory counts
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _NAMES.keys() & set(controllers.split(",")):
            top = root / controller
            inner = top / path.lstrip("/")
            for folder in (inner, *inner.parents):
                yield folder, _NAMES[controller]
                if folder == top:
                    break


def _limited(folder: Path, limit_name: str, usage_name: str, inactive_name: str) -> Memory | None:
    """Return the memory of a cgroup; None where it has no limit, or is not to be seen from a container."""
    try:
        limit, usage, stat = ((folder / name).read_text() for name in (limit_name, usage_name, "memory.stat"))
    except OSError:
        return None  # the top has none of these files; a container may see the path of a cgroup, and not the cgroup
    if limit.strip() == "max":
        return None
    values = dict(line.split() for line in stat.splitlines())
    return Memory(int(limit), max(int(limit) - int(usage) + int(values.get(inactive_name, 0)), 0))
