from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hpc_grpo.system.processes import catches, start_time
from tests.support.processes import NAME_CUT_IN_MID_CHARACTER, gone, start


def test_a_child_dies_with_its_parent() -> None:
    parent = start(
        "import subprocess, time\n"
        "from hpc_grpo.system.processes import die_with_parent\n"
        "subprocess.Popen(['sleep', '100'], preexec_fn=die_with_parent(), start_new_session=True)\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    (child,) = [process.pid for process in psutil.Process(parent.pid).children()]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while not gone(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gone(child)


def test_a_process_and_its_children_write_no_core_dumps() -> None:
    program = (
        "import subprocess, sys; from hpc_grpo.system.processes import write_no_core_dumps\n"
        "write_no_core_dumps()\n"
        "subprocess.run([sys.executable, '-c', 'import resource as r; print(r.getrlimit(r.RLIMIT_CORE)[0])'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "0\n"


def test_catches_tells_a_handler_from_the_default() -> None:
    child = start("import signal, time; signal.signal(10, print); print('ready', flush=True); time.sleep(100)")
    assert catches(child.pid, signal.SIGUSR1)
    assert not catches(child.pid, signal.SIGUSR2)
    child.kill()
    child.wait()


def test_a_strangers_process_with_a_name_cut_in_mid_character_is_no_error() -> None:
    child = start(NAME_CUT_IN_MID_CHARACTER)
    try:
        assert b"(caf\xc3)" in Path(f"/proc/{child.pid}/stat").read_bytes()
        assert start_time(child.pid) > start_time(os.getpid())
        assert not catches(child.pid, signal.SIGUSR1)
    finally:
        child.kill()
        child.wait()


def test_the_start_of_a_process_that_the_kernel_hides_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path) -> bytes:
        raise PermissionError(1, "Operation not permitted", str(path))  # as /proc does with hidepid

    monkeypatch.setattr(Path, "read_bytes", hidden)
    assert start_time(1) == 0
