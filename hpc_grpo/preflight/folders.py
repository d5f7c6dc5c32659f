"""Facts about a folder: its file system, free space, and whether it is writable. Also the doctor's own folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

from hpc_grpo.preflight.findings import Finding, failure, ok, warning
from hpc_grpo.run.files import free_bytes
from hpc_grpo.system.disk import existing, mount_of, read_mounts
from hpc_grpo.types import GIB

NETWORK = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.glusterfs", "wekafs"})
NODE_LOCAL = frozenset({"tmpfs", "ramfs", "overlay", "squashfs"})
_LEAST_FREE_GIB = 20.0


def file_system(path: Path, mounts: str | None = None) -> str:
    """Return the type of the file system of `path`. `mounts` has the format of /proc/self/mounts."""
    return mount_of(path.resolve(), read_mounts() if mounts is None else mounts).kind


def free_gib(path: Path) -> float:
    return free_bytes(path) / GIB


def write_error(path: Path) -> str:
    """Create and remove a file in the folder. Return the reason of a failure, or ""."""
    try:
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"doctor")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def own_folder(root: Path) -> Path:
    """Return a path for the folder of one examination below `root`. `hpc-grpo status` does not show it."""
    return root / ".doctor" / f"doctor-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"


def remove_own_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the folder of another examination is in it
        folder.parent.rmdir()


def run_folder_finding(root: Path) -> Finding:
    """Check that run directories can be created below `run.root`, on a file system that nodes share."""
    folder = existing(root)
    if error := write_error(folder):
        return failure(f"{folder} cannot be written: {error}", "set run.root to a folder you can write")
    return judged_run_folder(root, file_system(folder), free_gib(folder))


def judged_run_folder(root: Path, kind: str, num_free_gib: float) -> Finding:
    """Judge a run folder by the `kind` of its file system and its free space."""
    says = f"{root} is on {kind}, {num_free_gib:.0f} GiB free"
    if kind in NODE_LOCAL:
        fix = "set run.root to a folder on a shared file system"
        return warning(f"{says}: other nodes do not see it", fix)
    if num_free_gib < _LEAST_FREE_GIB:
        return warning(says, "make room, or set run.root elsewhere: a full disk pauses checkpoints")
    return ok(says)
