from __future__ import annotations

import signal
import subprocess

from hpc_grpo.system.signals import Signals, outliving_the_warning


def test_children_do_not_inherit_that_the_warning_does_nothing() -> None:
    with outliving_the_warning():
        done = subprocess.run(["sh", "-c", "kill -USR1 $$; echo alive"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGUSR1, "")


def test_a_hangup_is_collected_unless_nohup_has_it_ignored() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
    assert signals.pending == [signal.SIGHUP]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGHUP)
        assert signals.pending == []
    finally:
        signal.signal(signal.SIGHUP, before)
