"""Podman on machines: its state in the machine's own folder, settings that work as root without systemd.

There is no registry: containers run from a folder with the host's /usr in it (`podman run --rootfs`).
"""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

from .layout import Layout

_ETC = Path("/etc/containers")
_UNIFIED = Path("/sys/fs/cgroup/unified")
_MAX_PROCESSES = 16384
_FROM_HOST = ("passwd", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "ssl", "alternatives")


def write_files(layout: Layout, name: str) -> None:
    """Write a machine's /etc/containers."""
    etc, local = _etc(layout, name), layout.local
    if not _ETC.is_dir():
        return
    shutil.copytree(_ETC, etc, symlinks=True)
    for folder in (_crun(layout, name), layout.machine_dir(name) / "no-unified-cgroups"):
        folder.mkdir()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Podman's own limits are a million each, which root may not set where CAP_SYS_RESOURCE is missing. Without cgroups
    # of its own a container stays in those of whatever started it, so that a Slurm step's end reaches it.
    (etc / "containers.conf").write_text(
        "[containers]\n"
        f'default_ulimits = ["nofile={files}:{files}", "nproc={_MAX_PROCESSES}:{_MAX_PROCESSES}"]\n'
        'cgroups = "disabled"\nnetns = "host"\nlog_driver = "none"\n'
        f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "none"\nruntime = "crun"\ntmp_dir = "{local}/libpod"\n'
    )
    (etc / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{local}/containers"\nrunroot = "{local}/run-containers"\n'
    )


def binds(layout: Layout, name: str) -> list[tuple[Path, Path]]:
    """Return the mounts that podman needs; none where it is not installed."""
    if not _etc(layout, name).is_dir():
        return []
    found = [(_etc(layout, name), _ETC), (_crun(layout, name), Path("/run/crun"))]
    # crun takes a tree of version 1 with controllers in `unified` for one that it does not know.
    if _UNIFIED.is_dir():
        found.append((layout.machine_dir(name) / "no-unified-cgroups", _UNIFIED))
    return found


def write_rootfs(folder: Path) -> None:
    """Make a folder that `podman run -v /usr:/usr:ro --rootfs FOLDER` takes for a root file system like the host's."""
    for name in ("usr", "etc", "dev", "proc", "sys", "tmp", "run", "var", "root"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / name).symlink_to(f"usr/{name}")
    for path in (Path("/etc") / name for name in _FROM_HOST):
        if path.is_dir():
            shutil.copytree(path, folder / "etc" / path.name, symlinks=True)
        elif path.exists():
            shutil.copy(path, folder / "etc" / path.name)


def _etc(layout: Layout, name: str) -> Path:
    return layout.machine_dir(name) / "etc-containers"


def _crun(layout: Layout, name: str) -> Path:
    return layout.machine_dir(name) / "crun"
