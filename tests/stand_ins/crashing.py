"""The driver with a bug that every start meets."""

from __future__ import annotations

import sys
from typing import Any

from hpc_grpo.driver import main as train


def run(*_: Any) -> None:
    raise RuntimeError("a bug that every start meets")


if __name__ == "__main__":
    train.TrainingLoop.run = run
    sys.exit(train.main())
