"""The driver, but its engine handles adapters wrongly from version 1 on; the name of the run says how."""

from __future__ import annotations

import sys
from typing import Any

from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.engine.actor import Engine


class FaultyEngine(Engine):
    def __init__(self, config: Any, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self._fault = config.run.name.removeprefix("lora-")

    async def receive_weights(self, version: int, *args: Any) -> Any:
        from hpc_grpo.engine.receive import WeightReceiver

        if version == 0:
            load, before = WeightReceiver._hpc_grpo_load_adapter, []

            def faulty(self: Any, tensors: dict[str, Any], alpha: float) -> None:
                before.append({name: own.clone() for name, own in tensors.items()})
                if fault == "stale":  # lags one version
                    tensors = before[max(0, len(before) - 2)]
                elif fault == "half" and len(before) > 1:
                    tensors = {name: own for name, own in tensors.items() if ".layers.0." in name}
                if fault != "withheld" or len(before) == 1:
                    load(self, tensors, alpha)

            fault = self._fault
            WeightReceiver._hpc_grpo_load_adapter = faulty  # type: ignore[method-assign]
        return await super().receive_weights(version, *args)


if __name__ == "__main__":
    workers.Engine = FaultyEngine
    sys.exit(train.main())
