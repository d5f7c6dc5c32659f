"""Single processes: tie a child to its parent, identify one, read which signals it handles. Linux only.

psutil lacks prctl, `catches` and `hold_on`, and its start times move with the machine's clock. Without psutil,
`hpc-grpo status` also starts faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
"""Errors of /proc for a process that has ended, or that a site's hidepid hides."""

_FOREIGN = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
package = sys.argv.pop()
spec = spec_from_file_location("hpc_grpo", package + "/__init__.py", submodule_search_locations=[package])
sys.modules["hpc_grpo"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["hpc_grpo"])
"""
"""Makes only this package importable to another Python, not the other packages installed beside it."""


def start_program(
    module: str, environ: Mapping[str, str], output: int | None = None, python: str | None = None
) -> tuple[Any, socket.socket]:
    """Start `main(descriptor, parent_pid)` of a module in a new process and session. Return the Popen and our socket.

    With `python`, another interpreter runs the program, with its own packages. Raises OSError if it cannot start.

    The program has its end of the socket at `descriptor`, so its prints cannot mix with answers. It uses this process's
    search path, which finds the user's functions, instead of the path of -m. With -m the module would also be
    `__main__`, and its classes could not be unpickled here.
    """
    ours, theirs = socket.socketpair()
    flags = [flag for flag, on in (("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)) if on]
    path = "import sys; sys.path[:] = sys.argv.pop().split(chr(10))\n" if python is None else _FOREIGN
    program = f"{path}from {module} import main; main(int(sys.argv[1]), int(sys.argv[2]))"
    last = "\n".join(sys.path) if python is None else str(Path(__file__).parents[1])
    with theirs:
        process = subprocess.Popen(
            [python or sys.executable, *flags, "-c", program, str(theirs.fileno()), str(os.getpid()), last],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=dict(environ),
        )
    return process, ours


def kill_group(pid: int) -> None:
    """Kill a process started by `start_program`, with all processes in its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def die_with_parent() -> Callable[[], None]:
    """Return a `preexec_fn`: the child gets SIGTERM when the thread that starts it ends.

    Call Popen from the main thread: the kernel watches the starting thread, not the process.
    """
    return functools.partial(tie_to_parent, os.getpid(), signal.SIGTERM)


def tie_to_parent(parent: int, sig: int) -> None:
    """Let the kernel send `sig` to this process when the thread of process `parent` that started it ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent dies: `descendants` then sees them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def write_no_core_dumps() -> None:
    """Disable core dumps of this process and its children: they would contain secrets."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot. With the id this identifies a process uniquely.

    0 if it is gone, a zombie, or hidden because it is another user's.
    """
    # Bytes, because the kernel cuts a process's name at 15 bytes, maybe in the middle of a character.
    stat = _read(Path(f"/proc/{pid}/stat"))
    if not stat:
        return 0
    state, *fields = stat.rpartition(b")")[2].split()
    return 0 if state == b"Z" else int(fields[18])


@functools.cache
def boot_id() -> str:
    """Return the kernel's random id of this boot. Processes with another id are on another machine, or gone."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def pid_namespace() -> int:
    """Return the inode of this process's PID namespace. A container has its own."""
    return Path("/proc/self/ns/pid").stat().st_ino


@functools.cache
def machine_id() -> str:
    """Return the machine's id, which survives a reboot; "" without one, as in most containers."""
    return _read(Path("/etc/machine-id")).decode(errors="replace").strip()


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process and its machine in files that several machines read.

    `pid_started` is in clock ticks since boot. `boot_id` and `pid_namespace` say where `pid` is valid: two containers
    may share a hostname. `machine_id` distinguishes another machine from this one after a reboot.
    """

    host: str
    pid: int
    pid_started: int
    boot_id: str = field(default="", kw_only=True)
    pid_namespace: int = field(default=0, kw_only=True)
    machine_id: str = field(default="", kw_only=True)

    @staticmethod
    def of_this_process() -> ProcessIdentity:
        pid = os.getpid()
        return ProcessIdentity(
            socket.gethostname(),
            pid,
            start_time(pid),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            machine_id=machine_id(),
        )

    @property
    def is_on_this_machine(self) -> bool:
        """Return whether it is a process of this machine, from this boot or an earlier one."""
        return (self.host, self.machine_id) == (socket.gethostname(), machine_id())

    @property
    def is_on_this_host(self) -> bool:
        """Return whether the process is visible from here. A process in another container is not."""
        seen_alike = not self.boot_id or (self.boot_id, self.pid_namespace) == (boot_id(), pid_namespace())
        return self.host == socket.gethostname() and seen_alike

    @property
    def has_process(self) -> bool:
        """Return whether the process lives. Call this only on its own host."""
        return start_time(self.pid) == self.pid_started


def catches(pid: int, sig: int) -> bool:
    """Return whether the process has a handler for `sig`. Without one the signal would kill it."""
    return bool(int(_status(pid).get(b"SigCgt", b"0"), 16) >> (sig - 1) & 1)


def children(pid: int) -> list[int]:
    """Return the living children of a process, of all its threads; [] if the kernel does not list them."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except _GONE:
        return []
    return [int(child) for task in tasks for child in _read(task / "children").split()]


def hold_on(pid: int) -> Literal["", "stopped", "traced"]:
    """Return what stops a process: a stop signal or a debugger; "" if nothing does, or the process is gone."""
    status = _status(pid)
    if status.get(b"TracerPid", b"0") != b"0":
        return "traced"
    return "stopped" if status.get(b"State", b"").startswith(b"T") else ""


def _status(pid: int) -> dict[bytes, bytes]:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return dict(line.split(b":\t", 1) for line in lines if b":\t" in line)


def _read(path: Path) -> bytes:
    """Read a file of /proc; b"" for a process that is gone, or that a site's hidepid hides."""
    try:
        return path.read_bytes()
    except _GONE:
        return b""
