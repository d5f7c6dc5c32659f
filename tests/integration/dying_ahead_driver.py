"""The driver, but the first engine dies when it has been asked for three steps, before it has sampled any of them.

Each call that an engine gets is a line of `asked.jsonl`: the engine's process, and the ordinals.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import ray

from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.engine.actor import Engine

NUM_CALLS = 3


class DyingEngine(Engine):
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._log = config.run_path / "asked.jsonl"
        self._is_first = not self._log.exists()
        self._num_calls = 0

    async def generate(self, call: str, requests: Sequence[Any]) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps({"engine": os.getpid(), "ordinals": [request.ordinal for request in requests]}) + "\n")
        self._num_calls += 1
        if self._is_first and self._num_calls == NUM_CALLS:
            os.kill(os.getpid(), signal.SIGKILL)
        await super().generate(call, requests)

    @ray.method(num_returns=2)
    async def samples(self, call: str, index: int) -> Any:
        if self._is_first:
            await asyncio.Event().wait()  # until the end of the process
        return await super().samples(call, index)


if __name__ == "__main__":
    workers.Engine = DyingEngine
    sys.exit(train.main())
