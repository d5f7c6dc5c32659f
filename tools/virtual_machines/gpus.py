"""What a machine's nvidia-smi shows: a JSON file that tests rewrite, and the program that prints it."""

from __future__ import annotations

import json
import shlex
import sys
import uuid
from pathlib import Path

from .bed_layout import BedLayout

MEMORY_MIB = 81920


def write_state(layout: BedLayout, name: str, count: int) -> None:
    """Give a machine `count` idle GPUs; a machine that had some keeps them."""
    path = layout.gpus(name)
    if not path.exists():
        gpus = [
            {
                "index": index,
                "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{name}-{index}')}",
                "name": "NVIDIA A100-SXM4-80GB",
                "memory.total": MEMORY_MIB,
                "memory.used": 4,
                "utilization.gpu": 0,
            }
            for index in range(count)
        ]
        rewrite(path, {"gpus": gpus, "compute_apps": []})


def rewrite(path: Path, state: dict[str, object]) -> None:
    """Replace the file in one step: an nvidia-smi that runs meanwhile sees the one or the other."""
    written = path.with_suffix(".new")
    written.write_text(json.dumps(state, indent=1))
    written.replace(path)


def occupy(layout: BedLayout, name: str, index: int, memory_mib: int = 30000, pid: int = 4711) -> None:
    """Show somebody else's process on a GPU."""
    state = json.loads(layout.gpus(name).read_text())
    gpu = next(gpu for gpu in state["gpus"] if gpu["index"] == index)
    gpu["memory.used"] += memory_mib
    app = {"gpu_uuid": gpu["uuid"], "pid": pid, "process_name": "python", "used_memory": memory_mib}
    rewrite(layout.gpus(name), {**state, "compute_apps": [*state["compute_apps"], app]})


def write_program(layout: BedLayout) -> None:
    """Put `nvidia-smi` first on every machine's PATH; where there are no GPUs it fails as the real one does."""
    layout.programs.mkdir()
    program = layout.programs / "nvidia-smi"
    source = Path(__file__).with_name("nvidia_smi.py")
    command = shlex.join([sys.executable, str(source), str(layout.local / "gpus.json")])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    program.chmod(0o755)
