"""On what kind of file system a folder lies, and whether it can be written."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from hpc_grpo.preflight.findings import Finding, failure, ok, warning

NETWORK = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.glusterfs", "wekafs"})
NODE_LOCAL = frozenset({"tmpfs", "ramfs", "overlay", "squashfs"})
_LEAST_FREE_GIB = 20.0


def file_system(path: Path, mounts: str | None = None) -> str:
    """The type of the file system `path` is on (or would be); `mounts` as in /proc/self/mounts.

    >>> file_system(Path("/x/y"), "a / ext4 rw 0 0\\nb /x lustre rw 0 0\\n")
    'lustre'
    """
    text = mounts if mounts is not None else Path("/proc/self/mounts").read_text()
    rows = [line.split() for line in text.splitlines()]
    types = {_unescaped(row[1]): row[2] for row in rows if len(row) > 2}  # the last mount at a point is on top
    target = path if mounts is not None else path.resolve()
    return next((types[str(folder)] for folder in (target, *target.parents) if str(folder) in types), "unknown")


def existing(path: Path) -> Path:
    """The folder itself, else the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def free_gib(path: Path) -> float:
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize / 2**30


def write_error(path: Path) -> str:
    """Why no file can be made in the folder; "" if one can (it is removed again)."""
    try:
        with tempfile.TemporaryFile(dir=path) as probe:
            probe.write(b"doctor")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def own_folder(root: Path) -> Path:
    """A folder for one examination below `root`, hidden from `hpc-grpo list`; not made yet."""
    return root / ".doctor" / f"doctor-{time.strftime('%m%d-%H%M%S')}-{os.getpid()}"


def remove_own_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another examination's is in it
        folder.parent.rmdir()


def run_folder_finding(root: Path) -> Finding:
    """Whether run directories can be made below `run.root`, and whether other nodes can see them."""
    folder = existing(root)
    if error := write_error(folder):
        return failure("run folder", f"{folder} cannot be written: {error}", "set run.root to a folder you can write")
    return judged_run_folder(root, file_system(folder), free_gib(folder))


def judged_run_folder(root: Path, kind: str, free: float) -> Finding:
    """`kind` is the file system, `free` its free space in GiB."""
    told = f"{root} is on {kind}, {free:.0f} GiB free"
    if kind in NODE_LOCAL:
        return warning(
            "run folder", f"{told}: other nodes do not see it", "set run.root to a folder on a shared file system"
        )
    if free < _LEAST_FREE_GIB:
        return warning("run folder", told, "make room, or set run.root elsewhere: a full disk pauses checkpoints")
    return ok("run folder", told)


def _unescaped(mount_point: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount_point)
