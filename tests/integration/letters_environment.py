"""An environment in which a model with random weights earns something in each turn."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

from hpc_grpo import Turn

_TURNS = itertools.count()
_BEFORE_TROUBLE = 50
"""More than one of two processes answers in a step of the tests."""
_TROUBLES = {
    "hang": lambda: time.sleep(3600.0),
    "slow": lambda: time.sleep(3.0),
    "flood": lambda: print("x" * 100_000_000, flush=True),
}


class Letters:
    """Rewards each message by its share of letters, and answers with how many letters it had.

    `delay_s` makes each turn take so long. Its process leaves a file with its number in the folder `pids`. The first
    process that has answered _BEFORE_TROUBLE turns and finds a file `hang`, `slow` or `flood` in the folder `troubles`
    gives it the end `.PID`, and does what it is called.
    """

    def __init__(self, delay_s: float = 0.0, pids: str | None = None, troubles: str | None = None) -> None:
        self._delay_s, self._troubles = delay_s, troubles
        if pids is not None:
            Path(pids).mkdir(exist_ok=True)
            (Path(pids) / str(os.getpid())).touch()

    def reset(self, row, seed):
        return None  # the prompt of the data set

    def step(self, message):
        time.sleep(self._delay_s)
        if next(_TURNS) >= _BEFORE_TROUBLE and self._troubles is not None:
            for name, happens in _TROUBLES.items():
                with contextlib.suppress(FileNotFoundError):
                    Path(self._troubles, name).rename(Path(self._troubles, f"{name}.{os.getpid()}"))
                    happens()
        letters = sum(char.isalpha() for char in message)
        return Turn(f"\n{letters % 10}\n", reward=letters / max(len(message), 1), metrics={"letters": letters})
