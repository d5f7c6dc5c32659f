from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_grpo.driver.watchdog import Watchdog
from hpc_grpo.errors import EXIT_CRASH
from hpc_grpo.metrics.timing import StepTimer
from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE, STUCK_NAME
from hpc_grpo.run.stacks import STACKS_NAME, STACKS_SIGNAL


def wait_until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    ends_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < ends_at
        time.sleep(0.02)


def test_a_phase_past_its_deadline_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTEMPT_DIR_VARIABLE, str(tmp_path))
    timer = StepTimer()
    watchdog = Watchdog(timer, {"train": 0.1, "checkpoint": 3600.0})
    stuck = tmp_path / STUCK_NAME
    with timer.phase("checkpoint"):
        time.sleep(1.2)  # longer than the poll: nothing may be said of a phase within its deadline
    assert not stuck.exists()
    with timer.phase("train"):
        wait_until(stuck.exists)
    watchdog.close()
    assert stuck.read_text() == "The driver was in 'train' for more than deadlines.train_s = 0.1."


def test_on_a_full_disk_a_stuck_driver_prints_its_stacks_and_ends(tmp_path: Path) -> None:
    program = (
        "import errno, time\n"
        "from hpc_grpo.driver import watchdog\n"
        "from hpc_grpo.metrics.timing import StepTimer\n"
        "def refuse(path, text): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "def hang_here(): time.sleep(600)\n"
        "watchdog.write_atomic = refuse\n"
        "timer = StepTimer()\n"
        "watchdog.Watchdog(timer, {'checkpoint': 0.1})\n"
        "with timer.phase('checkpoint'): hang_here()\n"
    )
    env = {**os.environ, ATTEMPT_DIR_VARIABLE: str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_CRASH
    assert done.stdout == "error: The driver was in 'checkpoint' for more than deadlines.checkpoint_s = 0.1.\n"
    assert "hang_here" in done.stderr


def test_a_process_answers_the_signal_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    program = (
        "import threading, time\n"
        "from hpc_grpo.run.stacks import dump_stacks_on_signal\n"
        "def hang_here(): time.sleep(600)\n"
        "dump_stacks_on_signal('learner')\n"
        "threading.Thread(target=hang_here, daemon=True).start()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, ATTEMPT_DIR_VARIABLE: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(STACKS_SIGNAL)
            (path,) = (tmp_path / STACKS_NAME).glob(f"*-{process.pid}-learner.txt")
            wait_until(lambda: "hang_here" in path.read_text() and "Current thread" in path.read_text())
            assert process.poll() is None
        finally:
            process.kill()
