from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_grpo.system.processes import catches, descendants, end_processes, session_members, start_time


def start(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_descendants_are_found_through_sessions_and_ended() -> None:
    child = start(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    below = descendants(child.pid)
    assert len(below) == 1
    assert session_members(child.pid) == [child.pid]
    assert end_processes(lambda: [pid for pid in (child.pid, *below) if not gone(pid)], 5.0) == 0
    child.wait()
    assert all(gone(pid) for pid in below)


def test_what_ignores_sigterm_is_killed_and_counted() -> None:
    child = start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    assert end_processes(lambda: session_members(child.pid), 0.2) == 1
    assert child.wait() == -signal.SIGKILL


def test_a_child_dies_with_its_parent() -> None:
    parent = start(
        "import subprocess, time\n"
        "from hpc_grpo.system.processes import die_with_parent\n"
        "subprocess.Popen(['sleep', '100'], preexec_fn=die_with_parent(), start_new_session=True)\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    (child,) = descendants(parent.pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(child)


def test_catches_tells_a_handler_from_the_default() -> None:
    child = start("import signal, time; signal.signal(10, print); print('ready', flush=True); time.sleep(100)")
    assert catches(child.pid, signal.SIGUSR1)
    assert not catches(child.pid, signal.SIGUSR2)
    child.kill()
    child.wait()


def test_a_strangers_process_with_a_name_cut_in_mid_character_is_no_error() -> None:
    child = start(
        "import ctypes, time\n"
        "ctypes.CDLL(None).prctl(15, b'caf\\xc3')\n"  # PR_SET_NAME
        "print('ready', flush=True); time.sleep(100)"
    )
    try:
        assert b"(caf\xc3)" in Path(f"/proc/{child.pid}/stat").read_bytes()
        assert child.pid in descendants(os.getpid())
        assert start_time(child.pid) > start_time(os.getpid())
        assert not catches(child.pid, signal.SIGUSR1)
    finally:
        child.kill()
        child.wait()


def test_processes_that_the_kernel_hides_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    child = start("import time; print('ready', flush=True); time.sleep(100)")
    read = Path.read_bytes

    def read_own(path: Path) -> bytes:
        if path.parent.name not in (str(os.getpid()), str(child.pid)):
            raise PermissionError(1, "Operation not permitted", str(path))  # as /proc does with hidepid
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_own)
    assert descendants(os.getpid()) == [child.pid]
    assert start_time(1) == 0
    child.kill()
    child.wait()
