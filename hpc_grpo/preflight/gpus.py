"""The GPUs of a node as nvidia-smi lists them, and the CUDA that the installed torch was built for."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.preflight.asking import Answer, ask

_FIELDS = "index,name,memory.used,memory.total,utilization.gpu,driver_version"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `used_mib` counts all processes on it; `utilization` is in percent, of the last second."""

    index: int
    name: str
    used_mib: int
    total_mib: int
    utilization: int
    driver: str


def list_gpus() -> Answer:
    return ask(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])


def parse_gpus(text: str) -> list[Gpu]:
    """
    >>> parse_gpus("0, NVIDIA GH200 120GB, 12, 97871, [N/A], 565.57.01")[0].utilization
    0
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") >= 5]
    return [
        Gpu(_number(i), name, _number(used), _number(total), _number(busy), v) for i, name, used, total, busy, v in rows
    ]


def visible(found: Sequence[Gpu], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Those of the job: where Slurm hides no device, nvidia-smi lists the GPUs of other jobs too."""
    named = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return tuple(gpu for gpu in found if str(gpu.index) in named or not all(name.isdigit() for name in named))


def driver_cuda() -> str:
    """The newest CUDA that the driver can run, such as "12.7"; "" if nvidia-smi does not say."""
    return parse_driver_cuda(ask(["nvidia-smi"]).text)


def parse_driver_cuda(text: str) -> str:
    """
    >>> parse_driver_cuda("| NVIDIA-SMI 565.57.01   Driver Version: 565.57.01   CUDA Version: 12.7 |")
    '12.7'
    """
    match = re.search(r"\bCUDA[\w ]* Version\s*:\s*(\d+\.\d+)", text)
    return match[1] if match else ""


def wheel_cuda() -> str | None:
    """The CUDA of the installed torch, such as "12.8"; "" for a CPU build, None without torch. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return parse_wheel_cuda((Path(spec.origin).parent / "version.py").read_text())


def parse_wheel_cuda(text: str) -> str:
    """
    >>> parse_wheel_cuda("cuda: Optional[str] = '12.8'")
    '12.8'
    """
    match = re.search(r"^cuda\b[^=]*=\s*['\"](\d+\.\d+)", text, re.MULTILINE)
    return match[1] if match else ""


def _number(text: str) -> int:
    """0 for what nvidia-smi does not know ("[N/A]")."""
    return int(text) if text.isdigit() else 0
