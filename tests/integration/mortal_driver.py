"""The driver, but one engine raises while it samples, and one dies as it receives weights: each once.

In the run `frail` every engine raises while it samples.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import ray

from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.engine.actor import Engine

DIES_RECEIVING = 4
"""The weight version."""


class MortalEngine(Engine):
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._folder = config.run_path
        self._num_calls = 0
        self._is_frail = config.run.name == "frail"

    async def generate(self, call: str, requests: Sequence[Any]) -> None:
        await super().generate(call, requests)
        self._num_calls += 1

    @ray.method(num_returns=2)
    async def samples(self, call: str, index: int) -> Any:
        sampling = super().samples(call, index)
        if self._is_frail or (self._num_calls == 2 and self._is_first("raising")):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return await sampling

    async def receive_weights(self, version: int, *args: Any) -> Any:
        if version == DIES_RECEIVING and self._is_first("receiving"):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().receive_weights(version, *args)

    def _is_first(self, doing: str) -> bool:
        """Whether no engine has failed at this before."""
        try:
            (self._folder / f"failed-{doing}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


if __name__ == "__main__":
    workers.Engine = MortalEngine
    sys.exit(train.main())
