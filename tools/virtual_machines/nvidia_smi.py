"""A stand-in for nvidia-smi: `nvidia_smi.py STATE.json --query-gpu=index,uuid --format=csv,noheader,nounits`.

The state: {"gpus": [{"index": 0, "uuid": ..., "memory.total": MiB, ...}], "compute_apps": [{"gpu_uuid": ...}]}. With
"hang_s" it waits that long first; with "fails" it prints that and ends with 9, as where the driver is gone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

_UNITS = {"memory.total": "MiB", "memory.used": "MiB", "memory.free": "MiB", "used_memory": "MiB"}
_UNITS |= {"used_gpu_memory": "MiB", "utilization.gpu": "%", "utilization.memory": "%"}
_NO_DRIVER = 9
_BAD_ARGUMENT = 2


def table(rows: list[dict[str, object]], fields: list[str], options: set[str]) -> str:
    """Return CSV as nvidia-smi writes it: ", " between values, units unless `nounits`."""
    header = [f"{field} [{_UNITS[field]}]" if field in _UNITS else field for field in fields]
    lines = [] if "noheader" in options else [", ".join(header)]
    for row in rows:
        lines.append(", ".join(_cell(row, field, "nounits" not in options) for field in fields))
    return "".join(f"{line}\n" for line in lines)


def _cell(row: dict[str, object], field: str, with_unit: bool) -> str:
    value = row.get(field, "[N/A]")
    return f"{value} {_UNITS[field]}" if with_unit and field in _UNITS and value != "[N/A]" else str(value)


def _with_derived(gpu: dict[str, object]) -> dict[str, object]:
    total, used = gpu.get("memory.total"), gpu.get("memory.used")
    free = {"memory.free": total - used} if isinstance(total, int) and isinstance(used, int) else {}
    return {"count": 1, "gpu_uuid": gpu.get("uuid"), "gpu_name": gpu.get("name"), **free, **gpu}


def main() -> int:
    parser = argparse.ArgumentParser(prog="nvidia-smi")
    parser.add_argument("state", type=Path)
    parser.add_argument("-L", "--list-gpus", action="store_true")
    parser.add_argument("--query-gpu", default="")
    parser.add_argument("--query-compute-apps", default="")
    parser.add_argument("--format", default="csv")
    arguments = parser.parse_args()
    try:
        state = json.loads(arguments.state.read_text())
    except FileNotFoundError:
        state = {"fails": "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."}
    time.sleep(state.get("hang_s", 0))
    if "fails" in state:
        print(state["fails"])
        return _NO_DRIVER
    gpus = [_with_derived(gpu) for gpu in state["gpus"]]
    options = set(arguments.format.split(","))
    if arguments.list_gpus:
        for gpu in gpus:
            print(f"GPU {gpu['index']}: {gpu['name']} (UUID: {gpu['uuid']})")
    elif arguments.query_gpu or arguments.query_compute_apps:
        rows = gpus if arguments.query_gpu else state["compute_apps"]
        fields = (arguments.query_gpu or arguments.query_compute_apps).split(",")
        print(table(rows, fields, options), end="")
    else:
        print("this stand-in knows -L, --query-gpu and --query-compute-apps", file=sys.stderr)
        return _BAD_ARGUMENT
    return 0


if __name__ == "__main__":
    sys.exit(main())
