"""The driver, but one engine and one grader hang, each once, in C code that never lets go of Python's lock."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from hpc_grpo.config import Config, rollout
from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.engine.actor import Engine
from hpc_grpo.grading.grader import Grader

HANGS_AT_CALL = 4
"""Once it is known how long the work takes; the first of an engine measures."""


def hang_once(config: Config, doing: str) -> None:
    try:
        (config.run_path / f"hung-{doing}").touch(exist_ok=False)
    except FileExistsError:
        return
    ctypes.PyDLL(None).sleep(3600)  # with the lock: no thread of this process runs meanwhile


class HangingEngine(Engine):
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._config = config
        self._num_calls = 0

    async def generate(self, call: str, requests: Sequence[Any]) -> None:
        self._num_calls += 1
        if self._num_calls == HANGS_AT_CALL:
            sampler = self._loop.wait_ready()
            step = sampler.step
            sampler.step = lambda: (step(), hang_once(self._config, "engine"))  # type: ignore[method-assign]
        await super().generate(call, requests)


class HangingGrader(Grader):
    def __init__(self, config: Any, *args: Any) -> None:
        rollout.REWARD_LOAD_S = 1.0  # part of its patience
        super().__init__(config, *args)
        self._config = config
        self._num_calls = 0

    def _text(self, token_ids: list[int]) -> str:
        self._num_calls += 1
        if self._num_calls == 100:  # completions, of 24 a step
            hang_once(self._config, "grader")
        return super()._text(token_ids)


if __name__ == "__main__":
    workers.Engine = HangingEngine
    workers.Grader = HangingGrader
    sys.exit(train.main())
