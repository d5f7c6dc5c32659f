"""Read how much memory this process may still use: the node's free memory, or the rest of the job's cgroup."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_NAMES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Controller -> files of its limit, its usage and its reclaimable memory. "" is version 2."""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes."""

    total: int
    available: int


def host_memory(own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Memory:
    """Return the memory of the node or of this process's cgroup, whichever has less left.

    Slurm limits a job's memory by cgroups (`ConstrainRAMSpace`): the kernel kills a process above the limit, even if
    the node has free memory.
    """
    node = psutil.virtual_memory()
    found = [Memory(node.total, node.available)]
    for folder, names in _memory_cgroups(own, root):
        # The root cgroup has none of these files. A container may see a cgroup's path but not its files.
        with contextlib.suppress(OSError):
            limit, usage, stat = ((folder / name).read_text() for name in (*names[:2], "memory.stat"))
            inactive = dict(line.split() for line in stat.splitlines()).get(names[2], 0)
            if limit.strip() != "max":
                found.append(Memory(int(limit), max(int(limit) - int(usage) + int(inactive), 0)))
    return min(found, key=lambda memory: memory.available)


def freed_bytes() -> int:
    """Return how much less memory this process has now than at its peak."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    kib = {words[0]: int(words[1]) for words in lines if words[0] in ("VmHWM:", "VmRSS:")}
    return 1024 * max(0, kib["VmHWM:"] - kib["VmRSS:"])


def _memory_cgroups(own: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the cgroup of this process and its parents. Each may have a limit."""
    lines = []
    with contextlib.suppress(OSError):  # a container without cgroups, or without /proc: the node's memory counts
        lines = own.read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in _NAMES.keys() & set(controllers.split(",")):
            top, names = root / controller, _NAMES[controller]
            inner = top / path.lstrip("/")
            yield from ((folder, names) for folder in (inner, *inner.parents) if folder.is_relative_to(top))
