"""List the GPUs of this machine, by nvidia-smi, which uses no CUDA.

CUDA in this process would keep it from forking workers that use a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_grpo.system.commands import Answer, run_command

_FIELDS = "index,name,memory.used,utilization.gpu,uuid,pci.bus_id"


@dataclass(frozen=True)
class Gpu:
    """One GPU. `used_mib` counts all processes on it; `utilization` is in percent over the last second.

    `pci_address` is the name of its folder in sysfs.
    """

    index: int
    name: str
    used_mib: int
    utilization: int
    uuid: str = ""
    pci_address: str = ""


def ask_nvidia_smi() -> Answer:
    return run_command(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])


def parse_gpus(text: str) -> list[Gpu]:
    """Parse nvidia-smi's list of GPUs. A number that nvidia-smi does not know counts as 0.

    >>> parse_gpus("0, NVIDIA GH200 120GB, 12, [N/A], GPU-1a, 00000009:01:00.0")
    [Gpu(index=0, name='NVIDIA GH200 120GB', used_mib=12, utilization=0, uuid='GPU-1a', pci_address='0009:01:00.0')]
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 5]
    return [
        # PCI domains have eight digits here, and four in sysfs, in small letters.
        Gpu(_number(index), name, _number(used), _number(busy), uuid, address.lower()[-len("0009:01:00.0") :])
        for index, name, used, busy, uuid, address in rows
    ]


def find_gpus(names: Sequence[str], gpus: Sequence[Gpu]) -> list[Gpu] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by number or by the start of a UUID; None if one is missing.

    CUDA counts like nvidia-smi, by PCI address, if all GPUs of a node are of one kind.
    """
    found = [gpu for name in names for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name)]
    return found if len(found) == len(names) else None


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
