"""The driver, but one engine keeps its old weights from a version on: it takes part in publishes, and no more."""

from __future__ import annotations

import sys
from typing import Any

from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.engine.actor import Engine

STALE_FROM = 2
"""The weight version."""


class StaleEngine(Engine):
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._mark = config.run_path / "stale"

    async def receive_weights(self, version: int, *args: Any) -> Any:
        if version == STALE_FROM and not self._mark.exists():
            self._mark.touch()
            from hpc_grpo.engine.receive import WeightReceiver

            WeightReceiver._hpc_grpo_load = lambda *_, **__: None  # type: ignore[method-assign]
        return await super().receive_weights(version, *args)


if __name__ == "__main__":
    workers.Engine = StaleEngine
    sys.exit(train.main())
