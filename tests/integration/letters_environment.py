"""An environment in which a model with random weights earns something in each turn."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from hpc_grpo import Turn

_TURNS = itertools.count()
_BEFORE_IT_HANGS = 50
"""More than one of two processes answers in a step of the tests."""


class Letters:
    """Rewards each message by its share of letters, and answers with how many letters it had.

    `delay_s` makes each turn take so long. Its process leaves a file with its number in the folder `pids`. The first
    process that has answered _BEFORE_IT_HANGS turns and finds the file `hang` gives it the end `.PID`, and hangs.
    """

    def __init__(self, delay_s: float = 0.0, pids: str | None = None, hang: str | None = None) -> None:
        self._delay_s, self._hang = delay_s, hang
        if pids is not None:
            Path(pids).mkdir(exist_ok=True)
            (Path(pids) / str(os.getpid())).touch()

    def reset(self, row, seed):
        return None  # the prompt of the data set

    def step(self, message):
        time.sleep(self._delay_s)
        if next(_TURNS) >= _BEFORE_IT_HANGS and self._hang is not None:
            with contextlib.suppress(FileNotFoundError):
                Path(self._hang).rename(f"{self._hang}.{os.getpid()}")
                time.sleep(3600.0)
        letters = sum(char.isalpha() for char in message)
        return Turn(f"\n{letters % 10}\n", reward=letters / max(len(message), 1), metrics={"letters": letters})
