"""The driver, but one bit of the weights flips in shared memory between staging and announcing a version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hpc_grpo.driver import actors as workers
from hpc_grpo.driver import main as train
from hpc_grpo.learner.actor import LearnerActor
from hpc_grpo.weights.store import StoredVersion

CORRUPTED_VERSION = 2
"""After the first step: the engines hold a version and have sampled with it."""


class CorruptingLearner(LearnerActor):
    def open_weight_store(self, *args: Any, **kwargs: Any) -> Path | None:
        self._folder = super().open_weight_store(*args, **kwargs)
        return self._folder

    def stage_weights(self, version: int) -> StoredVersion | None:
        staged = super().stage_weights(version)
        if version != CORRUPTED_VERSION or self._folder is None:
            return staged
        with (self._folder / "weights.bin").open("r+b") as file:
            file.seek(1000)
            (byte,) = file.read(1)
            file.seek(1000)
            file.write(bytes([byte ^ 1]))
        return staged


if __name__ == "__main__":
    workers.LearnerActor = CorruptingLearner
    sys.exit(train.main())
