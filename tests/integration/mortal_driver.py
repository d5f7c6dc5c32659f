"""The driver, but one engine dies while it samples, and one while it receives weights: each once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from hpc_grpo import train, workers
from hpc_grpo.rollout.engine import Engine

DIES_RECEIVING = 4
"""The weight version."""


class MortalEngine(Engine):
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._folder = config.run_path
        self._num_calls = 0

    async def generate(self, requests: Sequence[Any]) -> Any:
        sampling = super().generate(requests)
        self._num_calls += 1
        if self._num_calls == 2:
            self._die_once("sampling")
        return await sampling

    async def receive_weights(self, version: int) -> None:
        if version == DIES_RECEIVING:
            self._die_once("receiving")
        await super().receive_weights(version)

    def _die_once(self, doing: str) -> None:
        try:
            (self._folder / f"died-{doing}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    workers.Engine = MortalEngine
    sys.exit(train.main())
