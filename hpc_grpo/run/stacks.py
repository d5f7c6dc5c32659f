"""Write the Python stacks of a run's processes below the attempt's folder, on a signal.

A separate module: every training process imports it, and the launching half imports its two names.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from pathlib import Path

from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE
from hpc_grpo.run.files import when_there_is_space

STACKS_NAME = "stacks"
"""The folder of the stacks, inside the attempt's folder."""

STACKS_SIGNAL = signal.SIGUSR2
"""Every training process writes its stacks when it receives this signal."""


def dump_stacks_on_signal(role: str) -> None:
    """Let STACKS_SIGNAL write the stacks of this process's threads to the attempt's folder, if there is an attempt."""
    if folder := os.environ.get(ATTEMPT_DIR_VARIABLE):
        path = Path(folder) / STACKS_NAME / f"{socket.gethostname()}-{os.getpid()}-{role}.txt"
        what = "the file of a process's stacks"
        when_there_is_space(lambda: path.parent.mkdir(parents=True, exist_ok=True), what)
        # The file stays open while the process lives, because the handler must not allocate.
        file = when_there_is_space(lambda: path.open("w"), what)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
