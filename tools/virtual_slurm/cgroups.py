"""Real cores for the nodes: a cpuset each, in which Slurm's task/cgroup binds steps to the cores they asked for.

Needs the kernel's first version of control groups, and no more CPUs a node than this machine has. Both nodes then
share its cores, as they share all else of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from . import namespaces
from .errors import ClusterUnavailableError
from .layout import Layout, Shape
from .processes import wait_until

CPUSET = Path("/sys/fs/cgroup/cpuset")
_REMOVE_DEADLINE_S = 20.0


def require(shape: Shape) -> None:
    """Raise where steps cannot be held to their cores on this machine."""
    if not os.access(CPUSET / "cpuset.cpus", os.W_OK):
        raise ClusterUnavailableError(f"cores cannot be constrained: no writable cgroup hierarchy at {CPUSET}")
    if (cores := len(os.sched_getaffinity(0))) < shape.cpus_per_node:
        raise ClusterUnavailableError(
            f"--constrain-cores: this machine has {cores} cores, {shape.cpus_per_node} a node"
        )


def make(layout: Layout, shape: Shape) -> None:
    for name in shape.node_names:
        folder = _folder(layout, name)
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):
            (folder / setting).write_text((CPUSET / setting).read_text())


def enter(layout: Layout, name: str) -> None:
    """Have this mount namespace see a node's cpuset as the whole hierarchy; nothing for other machines."""
    if (folder := _folder(layout, name)).is_dir():
        namespaces.bind(folder, CPUSET)


def remove(layout: Layout) -> None:
    """Take the cpusets away, from the leaves up; their processes may just be ending."""

    def gone() -> bool:
        found = [path for path in CPUSET.glob(f"{_prefix(layout)}-*") if path.is_dir()]
        for folder in [inner for top in found for inner in [top, *top.rglob("*")] if inner.is_dir()][::-1]:
            try:
                folder.rmdir()
            except OSError:
                return False
        return True

    wait_until(gone, _REMOVE_DEADLINE_S, f"{CPUSET}/{_prefix(layout)}-* are removed")


def _folder(layout: Layout, name: str) -> Path:
    return CPUSET / f"{_prefix(layout)}-{name}"


def _prefix(layout: Layout) -> str:
    return "virtual-slurm" + re.sub(r"\W", "-", str(layout.state))
