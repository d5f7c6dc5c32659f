"""An encoder for processes of `hpc_grpo.data.workers`: they start in a tenth of a second, as it has no tokenizer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from hpc_grpo.errors import ConfigError


class NumberingEncoder:
    """Makes of each item its number and the process that it was made in."""

    def encode(self, items: Sequence[dict[str, Any]], first: int) -> list[tuple[int, int]]:
        for number, item in enumerate(items, start=first):
            if item.get("sleeps_s"):
                time.sleep(item["sleeps_s"])
            if item.get("is_bad"):
                raise ConfigError(f"Item {number} cannot be used.")
            if item.get("kills"):
                os.kill(os.getpid(), signal.SIGKILL)
        print("what a library prints is no row")
        return [(number, os.getpid()) for number, _ in enumerate(items, start=first)]
