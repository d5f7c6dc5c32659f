from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE
from hpc_grpo.run.stacks import STACKS_NAME, STACKS_SIGNAL


def test_a_process_that_found_the_disk_full_answers_the_signal_with_the_stacks_of_all_threads(tmp_path: Path) -> None:
    program = (
        "import threading, time\n"
        "from pytest import MonkeyPatch\n"
        "from hpc_grpo.run.stacks import dump_stacks_on_signal\n"
        "from tests.support.full_disk import full_once\n"
        "refused = full_once(MonkeyPatch(), '-learner.txt')\n"
        "def hang_here(): time.sleep(600)\n"
        "dump_stacks_on_signal('learner')\n"
        "threading.Thread(target=hang_here, daemon=True).start()\n"
        "print('ready', len(refused), flush=True)\n"
        "time.sleep(600)\n"
    )
    env = {**os.environ, ATTEMPT_DIR_VARIABLE: str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            assert process.stdout is not None
            assert next(line for line in process.stdout if line.startswith("ready")) == "ready 1\n"
            process.send_signal(STACKS_SIGNAL)
            (path,) = (tmp_path / STACKS_NAME).glob(f"*-{process.pid}-learner.txt")
            ends_at = time.monotonic() + 20.0
            while not ("hang_here" in (text := path.read_text()) and "Current thread" in text):
                assert time.monotonic() < ends_at, text
                time.sleep(0.02)
            assert process.poll() is None
        finally:
            process.kill()
