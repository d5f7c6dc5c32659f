"""Asking the machine's own commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_grpo.system.commands import run_command


def test_a_command_that_hangs_or_is_no_program_is_an_answer(tmp_path: Path) -> None:
    assert run_command(["sleep", "30"], deadline_s=0.2).error == "sleep gave no answer within 0 s"
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x00\x01")
    garbage.chmod(0o755)
    assert "could not be run" in run_command([str(garbage)]).error
    absent = run_command(["no-such-command-anywhere"])
    assert (absent.is_absent, absent.error) == (True, "no no-such-command-anywhere on PATH")


def test_what_a_command_leaves_in_the_background_is_not_waited_for() -> None:
    answer = run_command(["sh", "-c", "cat; echo 8; sleep 60 & echo $! >&2; exit 0"], deadline_s=30.0, stdin="7\n")
    os.kill(int(answer.said), signal.SIGKILL)
    assert (answer.text, answer.error) == ("7\n8\n", "")


def test_a_process_that_sigkill_cannot_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi in state D, which no test can have: here nothing kills it."""
    started: list[subprocess.Popen[str]] = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: started.append(process))
    begun = time.monotonic()
    assert run_command(["sleep", "30"], deadline_s=0.2).is_late
    assert time.monotonic() - begun < 10.0
    (process,) = started
    process.terminate()
    process.wait(60)


_CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("begun", flush=True)
while True:
    time.sleep(0.05)
"""
_PARENT = f"""
import sys
from hpc_grpo.system.commands import run_in_foreground
sys.exit(run_in_foreground([sys.executable, "-c", {_CHILD!r}]))
"""


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGHUP], [signal.SIGINT, signal.SIGTERM]])
def test_a_command_in_the_foreground_is_told_of_sigterm_and_outlives_its_parents_sigint(
    signals: list[signal.Signals],
) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "begun\n"
    for sig in signals:
        parent.send_signal(sig)
    assert parent.wait(60) == 75


def test_a_command_in_the_foreground_is_told_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        parent.kill()
        assert parent.stdout.read() == "", "the pipe closes with the child"
