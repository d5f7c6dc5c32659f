"""Control groups of the nodes, of the kernel's first version: processes that Slurm tracks, and real cores if asked for.

With real cores Slurm's task/cgroup binds steps to those they asked for: no more a node than this machine has, which
all nodes share, as they share all else of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tools.virtual_machines.errors import UnavailableError
from tools.virtual_machines.processes import wait_until

from .layout import Layout, Shape

CPUSET = Path("/sys/fs/cgroup/cpuset")
FREEZER = Path("/sys/fs/cgroup/freezer")
_REMOVE_DEADLINE_S = 20.0


def require(shape: Shape) -> None:
    """Raise where steps cannot be held to their cores on this machine."""
    if not os.access(CPUSET / "cpuset.cpus", os.W_OK):
        raise UnavailableError(f"cores cannot be constrained: no writable cgroup hierarchy at {CPUSET}")
    if (cores := len(os.sched_getaffinity(0))) < shape.cpus_per_node:
        raise UnavailableError(f"--constrain-cores: this machine has {cores} cores, {shape.cpus_per_node} a node")


def has_freezer() -> bool:
    """Tell whether Slurm can track a step's processes in a group, by which a signal reaches its tasks alone."""
    return os.access(FREEZER / "tasks", os.W_OK)


def make(layout: Layout, shape: Shape) -> None:
    """Give each node groups of its own: several clusters of this machine have nodes of the same names."""
    for name in shape.node_names:
        if has_freezer():
            _folder(FREEZER, layout, name).mkdir(exist_ok=True)
        if shape.constrain_cores:
            folder = _folder(CPUSET, layout, name)
            folder.mkdir(exist_ok=True)
            for setting in ("cpuset.cpus", "cpuset.mems"):
                (folder / setting).write_text((CPUSET / setting).read_text())


def binds(layout: Layout, name: str) -> list[tuple[Path, Path]]:
    """Return the mounts by which a node sees its groups as the whole hierarchies; none for other machines."""
    groups = ((_folder(hierarchy, layout, name), hierarchy) for hierarchy in (FREEZER, CPUSET))
    return [(folder, hierarchy) for folder, hierarchy in groups if folder.is_dir()]


def remove(layout: Layout) -> None:
    """Take the groups away, from the leaves up; their processes may just be ending."""

    def gone() -> bool:
        tops = [path for one in (FREEZER, CPUSET) for path in one.glob(f"{_prefix(layout)}-*") if path.is_dir()]
        for folder in [inner for top in tops for inner in [top, *top.rglob("*")] if inner.is_dir()][::-1]:
            try:
                folder.rmdir()
            except OSError:
                return False
        return True

    wait_until(gone, _REMOVE_DEADLINE_S, f"{_prefix(layout)}-* are removed from {FREEZER} and {CPUSET}")


def _folder(hierarchy: Path, layout: Layout, name: str) -> Path:
    return hierarchy / f"{_prefix(layout)}-{name}"


def _prefix(layout: Layout) -> str:
    return "virtual-slurm" + re.sub(r"\W", "-", str(layout.state))
