"""Write the Python stacks of a run's processes below the attempt's folder, on a signal.

A module of its own because every process of training imports it, and the launching half its two names.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
from pathlib import Path

from hpc_grpo.run.contract import ATTEMPT_DIR_VARIABLE

STACKS_NAME = "stacks"
"""The folder of the stacks, inside the attempt's."""

STACKS_SIGNAL = signal.SIGUSR2
"""Answered with its stacks by every process of training."""


def dump_stacks_on_signal(role: str) -> None:
    """Answer STACKS_SIGNAL from here on with the stacks of this process's threads, in the attempt's folder."""
    if folder := os.environ.get(ATTEMPT_DIR_VARIABLE):
        path = Path(folder) / STACKS_NAME / f"{socket.gethostname()}-{os.getpid()}-{role}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        # Open as long as the process lives: the handler must not allocate.
        faulthandler.register(STACKS_SIGNAL, file=path.open("w"), all_threads=True)
