"""A reward that writes down where it runs, and leaves a file where Triton would leave a kernel."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EARLIER, OWN = "earlier.so", "own.so"


def tell(prompts: Sequence[str], completions: Sequence[str], told: str, **fields: Any) -> list[float]:
    """Append to the file `told`, in a run from copies: this Python, the weights, and the kernels that were there."""
    if folder := os.environ.get("HPC_GRPO_WEIGHTS_DIR"):
        kernels = Path(os.environ["TRITON_CACHE_DIR"])
        here = {
            "python": sys.executable,
            "kernels": sorted(path.name for path in kernels.iterdir()),
            "weights": {path.name: path.stat().st_size for path in Path(folder).iterdir()},
        }
        with Path(told).open("a") as file:
            file.write(json.dumps(here) + "\n")
        (kernels / OWN).write_text("compiled")
    return [sum(map(str.isalnum, text)) / max(len(text), 1) for text in completions]
