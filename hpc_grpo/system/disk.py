"""The space left for writing to a folder, in bytes and in files: free space and quotas.

Quotas come from the site's programs (`lfs quota` on Lustre, `quota` elsewhere). Without an answer the file system's
numbers count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.errors import ConfigError
from hpc_grpo.system.commands import Answer, run_command

_DEADLINE_S = 5.0
_KIB = 1024
_OCTAL = re.compile(r"\\([0-7]{3})")
_WITHOUT_QUOTAS = ("tmpfs", "ramfs", "overlay", "squashfs", "unknown")

Run = Callable[[Sequence[str], float], Answer]


@dataclass(frozen=True)
class Mount:
    """A mounted file system: its device, its mount point and its type."""

    device: str
    point: str
    kind: str


@dataclass(frozen=True)
class Room:
    """Bytes and files that may still be written, and what limits each. `num_files` is None if nothing counts files."""

    num_bytes: int
    limit: str
    num_files: int | None = None
    files_limit: str = "free"


@dataclass(frozen=True)
class Quota:
    """One quota of a file system: used and allowed bytes and files. 0 allowed means no limit."""

    file_system: str
    used: int
    allowed: int
    used_files: int = 0
    allowed_files: int = 0


def room_in(folder: Path, run: Run = run_command) -> Room:
    """Return the tightest limits in `folder` or its nearest existing parent. Raises ConfigError if they are unknown."""
    there = existing(folder)
    try:
        found = os.statvfs(there)
    except OSError as error:
        raise ConfigError(
            f"The file system of {there} does not report free space ({error.strerror}). Set run.root to a folder that "
            f"works, or check this one: df {there}"
        ) from error
    in_bytes, in_files = [(found.f_bavail * found.f_frsize, "free")], [(found.f_favail, "free")]
    for name, quota in _quotas(there, run):
        limit = f"left of the {name} quota"
        in_bytes += [(max(0, quota.allowed - quota.used), limit)] if quota.allowed else []
        in_files += [(max(0, quota.allowed_files - quota.used_files), limit)] if quota.allowed_files else []
    if not found.f_files:  # Btrfs and others have no limit of files
        in_files = in_files[1:]
    return Room(*min(in_bytes), *(min(in_files) if in_files else ()))


def existing(path: Path) -> Path:
    """Return `path` if it is a folder, else its nearest parent that exists and is visible."""

    def is_seen(folder: Path) -> bool:
        try:
            return folder.is_dir()
        except PermissionError:  # below another user's folder
            return False

    return next(filter(is_seen, (path, *path.parents)))


def mount_of(path: Path, mounts: str) -> Mount:
    """Return the mount that `path` is on, or would be; `mounts` is as in /proc/self/mounts.

    >>> mount_of(Path("/x/y"), "a / ext4 rw 0 0\\nb /x lustre rw 0 0\\n")
    Mount(device='b', point='/x', kind='lustre')
    """
    rows = [line.split() for line in mounts.splitlines()]
    found = {}  # the last mount at a point hides earlier ones
    for device, escaped, kind in (row[:3] for row in rows if len(row) > 2):
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), escaped)  # blanks are escaped
        found[point] = Mount(device, point, kind)
    unknown = Mount("", "/", "unknown")
    return next((found[str(folder)] for folder in (path, *path.parents) if str(folder) in found), unknown)


def read_mounts() -> str:
    return Path("/proc/self/mounts").read_text()


def parse_quotas(text: str) -> Iterator[Quota]:
    """Parse the limits in the output of `lfs quota -q -u USER FOLDER` or `quota -w`.

    Columns: file system, KiB used (`*`: over the soft limit, `[]`: not certain), soft limit, hard limit, grace, then
    the same for files. A long file system name has its own line.

    >>> [*parse_quotas("  /scratch  1024*  2048  4096  6d  17  0  90  -")]
    [Quota(file_system='/scratch', used=1048576, allowed=4194304, used_files=17, allowed_files=90)]
    """
    words = text.split()
    for index, word in enumerate(words[:-3]):
        after = [other.strip("[]*") for other in words[index + 1 : index + 8]]
        if "/" not in word or not all(map(str.isdigit, after[:3])):
            continue
        used, soft, hard = map(int, after[:3])
        # In `quota -w`, the grace column between blocks and files is blank without a grace period.
        files = [int(other) for other in after[3:7] if other.isdigit()][:3]
        used_files, soft_files, hard_files = files if len(files) == 3 else (0, 0, 0)
        quota = Quota(word, used * _KIB, (hard or soft) * _KIB, used_files, hard_files or soft_files)
        if quota.allowed or quota.allowed_files:
            yield quota


def _quotas(folder: Path, run: Run) -> Iterator[tuple[str, Quota]]:
    mount = mount_of(folder.resolve(), read_mounts())
    if mount.kind == "lustre":
        project = run(["lfs", "project", "-d", str(folder)], _DEADLINE_S)
        owners = {"user": ["-u", str(os.getuid())], "group": ["-g", str(folder.stat().st_gid)]}
        number = next(iter(project.text.split()), "0")
        if number.isdigit() and number != "0":
            owners["project"] = ["-p", number]
        for name, words in owners.items() if not project.is_absent else ():
            answer = run(["lfs", "quota", "-q", *words, str(folder)], _DEADLINE_S)
            yield from ((name, quota) for quota in parse_quotas(answer.text))
    elif mount.kind not in _WITHOUT_QUOTAS:
        for quota in parse_quotas(run(["quota", "-w"], _DEADLINE_S).text):
            if quota.file_system in (mount.device, mount.point):
                yield "user", quota
