from __future__ import annotations

import signal
import subprocess

from hpc_grpo.system.signals import outliving_the_warning


def test_children_do_not_inherit_that_the_warning_does_nothing() -> None:
    with outliving_the_warning():
        done = subprocess.run(["sh", "-c", "kill -USR1 $$; echo alive"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGUSR1, "")
