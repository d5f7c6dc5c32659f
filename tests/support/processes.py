"""Real processes for tests of what the system offers."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 120.0

NAME_CUT_IN_MID_CHARACTER = (
    "import ctypes, time\n"
    "ctypes.CDLL(None).prctl(15, b'caf\\xc3')\n"  # PR_SET_NAME
    "print('ready', flush=True); time.sleep(100)"
)
"""A program whose name in /proc is no UTF-8, as the kernel leaves it of a long one."""


def start(program: str) -> subprocess.Popen[str]:
    """Run a Python program in a session of its own; return once it has printed "ready"."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def gone(pid: int) -> bool:
    """Tell whether the process has ended, whoever still has to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # before it is opened, and before it is read
        return True


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"after {DEADLINE_S:.0f} s still not true: {what}"
        time.sleep(0.01)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
