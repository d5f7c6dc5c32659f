"""Builds a sandbox of namespaces and becomes its first process: `python -I enter.py ARGUMENTS`.

ARGUMENTS is JSON: `shown` (paths to bind read-only), `tmp_bytes`, and `argv` (to execute inside). It creates new user,
mount, process, network, IPC, host name and control group namespaces. The new root has one writable folder, /tmp in
memory. After the last `exec` no capability is left. bubblewrap does the same, but sites would have to install it. Root
first becomes nobody, because the kernel does not limit root's processes.

It imports only the standard library. If a step fails, it exits with 71 and names the step in one line.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import stat
import sys
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)

_NAMESPACES = 0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""CLONE_NEWUSER, NEWNS, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
_KEPT_FLAGS = {1: 1, 2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flags of statvfs -> those of mount. A user namespace may not remove a flag of the outer mount."""

_NEW_MOUNTS = 0x00020000
_STAGE = "/tmp"
_PARTS_IN_TMP = len(Path("/new/tmp/folder").parts)
_MNT_DETACH = 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE = 1, 4
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

NOBODY = 65534
INNER_USER = 1000
_DEVICES = ("null", "full", "random", "urandom")
"""Omits `zero`: its shared mappings belong to no process, so no limit counts their memory."""
_HIDDEN_IN_PROC = ("sys", "sysrq-trigger", "irq", "bus", "fs")
EXIT_REFUSED = 71


def main(arguments: dict[str, Any]) -> None:
    shown = {path: path for path in arguments["shown"] if os.path.lexists(path)}
    if os.getuid() == 0:
        shown = _staged(shown)
        _become_nobody()
    uid, gid = os.getuid(), os.getgid()
    _call("unshare", _NAMESPACES)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INNER_USER} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{INNER_USER} {gid} 1")
    if child := os.fork():  # the child is the first process of the new process namespace
        _, status = os.waitpid(child, 0)
        sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _build_root(shown, arguments["tmp_bytes"])
    _call("sethostname", b"sandbox", 7)
    os.chdir("/tmp")
    os.execve(
        arguments["argv"][0],
        arguments["argv"],
        {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"},
    )


def _staged(shown: dict[str, str]) -> dict[str, str]:
    """Bind the paths below a folder that anybody may enter: root gives up its rights, and a path may be below /root."""
    _call("unshare", _NEW_MOUNTS)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    # Opened before the mount, which may cover the paths.
    opened = {path: os.open(path, os.O_PATH | os.O_NOFOLLOW) for path in shown}
    _mount("tmpfs", _STAGE, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    staged = {path: f"{_STAGE}/{number}" for number, path in enumerate(shown)}
    for path, descriptor in opened.items():
        if stat.S_ISLNK(os.fstat(descriptor).st_mode):
            Path(staged[path]).symlink_to(os.readlink("", dir_fd=descriptor))
        else:
            _bind(f"/proc/self/fd/{descriptor}", Path(staged[path]))
        os.close(descriptor)
    return staged


def _become_nobody() -> None:
    """Become nobody: the kernel does not limit root's processes, and root owns /proc/sys."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # else uid_map is root's


def _build_root(shown: dict[str, str], tmp_bytes: int) -> None:
    """Make a root of read-only binds, and leave the old root permanently."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for name in ("old", "new"):
        Path("/tmp", name).mkdir()
    _pivot_root("/tmp", "/tmp/old")  # now paths below /tmp can be shown too
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder in ("proc", "dev", "tmp", "etc"):
        Path("/new", folder).mkdir()
    _mount("tmpfs", "/new/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={tmp_bytes},nr_inodes=4096,mode=700")
    read_only = {"/new"}
    for path, source in shown.items():
        # /dev/shm is a link to /tmp.
        target = Path(f"/new/tmp/{path.removeprefix('/dev/shm/')}" if path.startswith("/dev/shm/") else f"/new{path}")
        if len(target.parts) > _PARTS_IN_TMP and target.is_relative_to("/new/tmp"):
            above = Path(*target.parts[:_PARTS_IN_TMP])  # a separate mount, which no program can write to or remove
            if str(above) not in read_only:
                above.mkdir()
                _mount("tmpfs", str(above), "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
                read_only.add(str(above))
        _show(f"/old{source}", target)
    Path("/new/etc/passwd").write_text(f"user:x:{INNER_USER}:{INNER_USER}::/tmp:/bin/sh\n")
    for device in _DEVICES:
        Path(f"/new/dev/{device}").touch()
        _mount(f"/old/dev/{device}", f"/new/dev/{device}", None, _MS_BIND)
    links = {"stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
    for name, points_to in {**links, "fd": "/proc/self/fd", "shm": "/tmp"}.items():
        Path("/new/dev", name).symlink_to(points_to)
    _mount_proc()
    for folder in read_only:
        _mount(None, folder, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir("/new")
    _pivot_root(".", ".")
    _call("umount2", b".", _MNT_DETACH)
    os.chdir("/")


def _show(source: str, target: Path) -> None:
    """Bind a path read-only, with what is mounted below it. Copy a symbolic link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if Path(source).is_symlink():
        target.symlink_to(Path(source).readlink())
        return
    _bind(source, target)
    lines = Path("/old/proc/self/mountinfo").read_text().split("\n")[:-1]
    # White space and backslashes are written as \\040.
    points = [re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), line.split(" ")[4]) for line in lines]
    for point in (str(target), *(each for each in points if each.startswith(f"{target}/"))):
        kept = sum(flag for bit, flag in _KEPT_FLAGS.items() if os.statvfs(point).f_flag & bit)
        _mount(None, point, None, kept | _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _bind(source: str, target: Path) -> None:
    """Bind a file or folder to a new place."""
    if Path(source).is_dir():
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    _mount(source, str(target), None, _MS_BIND | _MS_REC)


def _mount_proc() -> None:
    """Mount this namespace's processes, and nothing else of /proc. After this, no namespace can be created inside."""
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount("proc", "/new/proc", "proc", flags)
    Path("/new/proc/sys/user/max_user_namespaces").write_text("0")
    _call("umount2", b"/new/proc", 0)
    try:
        _mount("proc", "/new/proc", "proc", flags, "subset=pid")
    except OSError:  # before Linux 5.8
        _mount("proc", "/new/proc", "proc", flags)
        for name in _HIDDEN_IN_PROC:
            if Path(path := f"/new/proc/{name}").exists():
                _mount(path, path, None, _MS_BIND | _MS_REC)
                _mount(None, path, None, flags | _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def _pivot_root(new: str, old: str) -> None:
    number = _SYS_PIVOT_ROOT[os.uname().machine]
    _call("syscall", number, new.encode(), old.encode(), step=f"pivot_root {new}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    *words, options = [word.encode() if word is not None else None for word in (source, target, kind, data)]
    _call("mount", *words, ctypes.c_ulong(flags), options, step=f"mount {target}")


def _call(name: str, *arguments: object, step: str = "") -> None:
    if getattr(_LIBC, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{step or name}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as error:
        print(f"cannot build a sandbox: {error}", file=sys.stderr)
        os._exit(EXIT_REFUSED)
