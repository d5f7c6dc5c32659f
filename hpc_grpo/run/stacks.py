"""Python stacks of a run's processes: asked for by a signal, written below the attempt's folder."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from pathlib import Path

from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE

STACKS_NAME = "stacks"
"""Folder in the attempt's: the Python stacks of its processes."""

STACKS_SIGNAL = signal.SIGUSR2
"""Answered with its stacks by every process of training."""


def dump_stacks_on_signal(role: str) -> None:
    """From here on this process answers STACKS_SIGNAL with its threads' stacks, in the attempt's folder."""
    if folder := os.environ.get(ATTEMPT_DIR_VARIABLE):
        path = Path(folder) / STACKS_NAME / f"{socket.gethostname()}-{os.getpid()}-{role}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Open as long as the process lives: the handler must not allocate.
        faulthandler.register(STACKS_SIGNAL, file=path.open("w"), all_threads=True)
