from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.system.process_tree import descendants, end_processes, session_members
from tests.support.processes import NAME_CUT_IN_MID_CHARACTER, gone, start


def test_descendants_are_found_through_sessions_and_ended() -> None:
    child = start(
        "import subprocess, time\n"
        "subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    below = descendants(child.pid)
    assert len(below) == 1
    assert session_members(child.pid) == [child.pid]
    end_processes(lambda: [pid for pid in (child.pid, *below) if not gone(pid)], 5.0)
    assert child.wait() == -signal.SIGTERM
    assert all(gone(pid) for pid in below)


def test_what_ignores_sigterm_is_killed() -> None:
    child = start(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    end_processes(lambda: session_members(child.pid), 0.2)
    assert child.wait() == -signal.SIGKILL


def test_processes_that_the_kernel_hides_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    child = start("import time; print('ready', flush=True); time.sleep(100)")
    own = (str(os.getpid()), str(child.pid))
    ordinary_open = builtins.open

    def open_own(path: Any, *args: Any, **options: Any) -> Any:
        parts = Path(str(path)).parts
        if parts[1:2] == ("proc",) and parts[2].isdigit() and parts[2] not in own:
            raise PermissionError(1, "Operation not permitted", str(path))  # as /proc does with hidepid
        return ordinary_open(path, *args, **options)

    monkeypatch.setattr(builtins, "open", open_own)
    assert descendants(os.getpid()) == [child.pid]
    assert session_members(child.pid) == [child.pid]
    child.kill()
    child.wait()


def test_a_strangers_process_with_a_name_cut_in_mid_character_is_no_error() -> None:
    child = start(NAME_CUT_IN_MID_CHARACTER)
    try:
        assert child.pid in descendants(os.getpid())
    finally:
        child.kill()
        child.wait()


def test_orphans_are_adopted_and_reaped_but_for_those_that_a_popen_waits_for() -> None:
    program = (
        "import os, signal, subprocess, time\n"
        "from hpc_grpo.system.process_tree import descendants, reap_adopted\n"
        "from hpc_grpo.system.processes import adopt_orphans\n"
        "adopt_orphans()\n"
        "subprocess.run(['sh', '-c', 'sleep 60 &'])\n"
        "orphans = descendants(os.getpid())\n"
        "os.kill(orphans[0], signal.SIGKILL)\n"
        "while descendants(os.getpid()): time.sleep(0.02)\n"
        "zombie = os.path.exists(f'/proc/{orphans[0]}')\n"
        "reap_adopted(keep=[])\n"
        "print(len(orphans), zombie, os.path.exists(f'/proc/{orphans[0]}'))\n"
        "kept = subprocess.Popen(['false'])\n"
        "while descendants(os.getpid()): time.sleep(0.02)\n"
        "reap_adopted(keep=[kept.pid])\n"
        "print(kept.wait())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "True", "False", "1"]
