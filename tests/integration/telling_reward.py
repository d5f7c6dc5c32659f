"""A reward that writes down where it runs, and leaves a file where Triton would leave a kernel."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KERNEL = "kernel.so"


def tell(prompts: Sequence[str], completions: Sequence[str], told: str, **fields: Any) -> list[float]:
    """Append to the file `told`: this Python, the copied weights, and the kernels that were there before."""
    kernels, weights = Path(os.environ["TRITON_CACHE_DIR"]), Path(os.environ["HPC_GRPO_WEIGHTS_DIR"])
    here = {
        "python": sys.executable,
        "kernels": [path.name for path in kernels.iterdir()],
        "weights": {path.name: path.stat().st_size for path in weights.iterdir()},
    }
    with Path(told).open("a") as file:
        file.write(json.dumps(here) + "\n")
    (kernels / KERNEL).write_text("compiled")
    return [float(index % 2) for index in range(len(completions))]
