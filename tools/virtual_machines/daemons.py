"""Daemons of machines: started so that they outlive this process, known again by their records."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import machine
from .bed_layout import BedLayout
from .errors import MachineError
from .processes import ProcessRecord

_DEADLINE_S = 30.0


def start(layout: BedLayout, name: str, service: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a daemon that stays in the foreground; its output goes to the log folder."""
    if running(layout, name, service) is not None:
        raise MachineError(f"{service} runs on {name} already")
    with (layout.logs / f"{service}-{name}.log").open("ab") as log:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
        process = machine.popen(layout, name, argv, env=dict(environment), outlives=True, **options)
    path = layout.daemon(name, service)
    path.parent.mkdir(exist_ok=True)
    ProcessRecord.of(process.pid).write(path)


def running(layout: BedLayout, name: str, service: str) -> ProcessRecord | None:
    record = ProcessRecord.read(layout.daemon(name, service))
    return record if record is not None and record.alive() else None


def require(layout: BedLayout, name: str, service: str) -> ProcessRecord:
    record = running(layout, name, service)
    if record is None:
        raise MachineError(f"{service} does not run on {name}")
    return record


def stop(layout: BedLayout, name: str, service: str, number: signal.Signals = signal.SIGTERM) -> None:
    """Ask a daemon to end, and wait until it has."""
    record = require(layout, name, service)
    thaw(layout, name, service)
    os.kill(record.pid, number)
    record.wait(_DEADLINE_S)
    layout.daemon(name, service).unlink()


def freeze(layout: BedLayout, name: str, service: str) -> None:
    """Stop a daemon and all that it has started: connections stay open, and nothing answers."""
    for pid in family(require(layout, name, service).pid):
        with contextlib.suppress(ProcessLookupError):  # a session that has just ended
            os.kill(pid, signal.SIGSTOP)


def thaw(layout: BedLayout, name: str, service: str) -> None:
    for pid in family(require(layout, name, service).pid):
        with contextlib.suppress(ProcessLookupError):  # a session that has just ended
            os.kill(pid, signal.SIGCONT)


def names(layout: BedLayout, name: str) -> list[str]:
    """Return the daemons that run on a machine."""
    found = sorted(path.stem for path in layout.daemon(name, "").parent.glob("*.json"))
    return [service for service in found if running(layout, name, service)]


def pids(layout: BedLayout, name: str) -> set[int]:
    """Return the processes of a machine's daemons: of sshd itself alone, since what it lets in is its users'."""
    found = set()
    for service in names(layout, name):
        record = require(layout, name, service)
        found |= {record.pid} if service == "sshd" else set(family(record.pid))
    return found


def family(pid: int) -> list[int]:
    """Return a process and its descendants, the oldest first."""
    parents: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        parents.setdefault(parent, []).append(child)
    found = [pid]
    for member in found:
        found += parents.get(member, [])
    return found


def in_pid_space_of(init: int) -> dict[int, str]:
    """Return the processes that share the PID space of `init`, without itself: pid -> command line."""
    own = os.stat(f"/proc/{init}/ns/pid").st_ino  # noqa: PTH116
    found = {}
    for pid in _parents():
        try:
            shares = os.stat(f"/proc/{pid}/ns/pid").st_ino == own  # noqa: PTH116
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if shares and pid != init and words:  # one without a command line is over, and about to be reaped
            found[pid] = words.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    return found


def _parents() -> dict[int, int]:
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        found[int(folder.name)] = int(fields[1])
    return found
