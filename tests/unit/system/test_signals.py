from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpc_grpo.launch.supervisor import attempt
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.signals import Signals, outliving_the_warning


def warn_this_process() -> None:
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "it would end the tests"
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_warning_while_a_link_ends_does_not_keep_it_from_its_successor(tmp_path: Path) -> None:
    finished: list[Any] = []

    class Link:
        before = None

        def start(self) -> None: ...

        def queue_again(self) -> None: ...

        def finish(self, record: Any) -> None:
            warn_this_process()
            finished.append(record.attempt)

        def tell(self) -> None:
            finished.append("told")

    def run() -> int:
        with Signals() as signals:
            warn_this_process()
            assert signals.pending == [signal.SIGUSR1]
        return 75

    supervisor: Any = SimpleNamespace(run=run, record=SimpleNamespace(attempt=1, job_id="7"))
    link: Any = Link()
    assert attempt._supervise(supervisor, RunDir(tmp_path), link) == 75
    assert finished == [1, "told"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_children_do_not_inherit_that_the_warning_does_nothing() -> None:
    with outliving_the_warning():
        done = subprocess.run(["sh", "-c", "kill -USR1 $$; echo alive"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGUSR1, "")
