"""List the GPUs of this machine, and keep a process on the cores next to its GPUs.

Uses nvidia-smi instead of CUDA: a process that has initialized CUDA cannot fork workers that use a GPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.system.commands import Answer, run_command

_FIELDS = "index,name,memory.used,utilization.gpu,uuid,pci.bus_id,memory.total"
_FREED_S = 60


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
    total_mib: int = 0


def ask_nvidia_smi() -> Answer:
    return run_command(["nvidia-smi", f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])


def parse_gpus(text: str) -> list[Gpu]:
    """Parse nvidia-smi's list of GPUs. A number that nvidia-smi does not know counts as 0.

    >>> parse_gpus("0, NVIDIA GH200, 12, [N/A], GPU-1a, 00000009:01:00.0, 97871")  # doctest: +NORMALIZE_WHITESPACE
    [Gpu(index=0, name='NVIDIA GH200', used_mib=12, utilization=0, uuid='GPU-1a', pci_address='0009:01:00.0',
         total_mib=97871)]
    """
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 6]
    return [
        # PCI domains have eight digits here; in sysfs they have four, in lower case: 0009:01:00.0.
        Gpu(_number(index), name, _number(used), _number(busy), uuid, address.lower()[-12:], _number(total))
        for index, name, used, busy, uuid, address, total in rows
    ]


def find_gpus(names: Sequence[str], gpus: Sequence[Gpu]) -> list[Gpu] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by number or by the start of a UUID; None if one is missing.

    CUDA counts like nvidia-smi, by PCI address, if all GPUs of a node are of one kind.
    """
    found = [gpu for name in names for gpu in gpus if name == str(gpu.index) or gpu.uuid.startswith(name)]
    return found if len(found) == len(names) else None


def wait_for_free_gpus(
    share: float,
    environ: Mapping[str, str] = os.environ,
    ask: Callable[[], Answer] = ask_nvidia_smi,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until this share of the memory of the GPUs of CUDA_VISIBLE_DEVICES is free, at most a minute.

    A killed process frees its memory some seconds later, and vLLM does not wait: it refuses to start.
    """
    for _ in range(_FREED_S):
        gpus = find_gpus(visible_gpus(environ), parse_gpus(ask().text)) or []
        if all(not gpu.total_mib or gpu.used_mib <= (1.0 - share) * gpu.total_mib for gpu in gpus):
            return
        sleep(1.0)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def keep_near_gpus(
    environ: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys"), ask: Callable[[], Answer] = ask_nvidia_smi
) -> str:
    """Bind this process to the cores near the GPUs of CUDA_VISIBLE_DEVICES. Return a line about it, "" for no change.

    For nodes with several NUMA nodes: a GH200 node has four with 72 cores each. Nothing else does this: steps of a job
    run with --cpu-bind=none, and Ray selects a process's GPUs but not its cores. Its memory follows: Linux takes a page
    from the NUMA node of the core that first touches it. Threads of libraries, and an engine's tensor-parallel workers,
    inherit the cores.

    Uses only the cores that the process has from its cgroup's cpuset. Does nothing if these are fewer than its
    OMP_NUM_THREADS: slow memory costs less than threads that wait for each other.
    """
    visible = visible_gpus(environ)
    if not visible or len(parse_cpulist(_read(sysfs / "devices/system/node/has_cpu"))) < 2:
        return ""
    answer = ask()
    if answer.error:
        return f"Cores are not bound: {answer.error}."
    gpus = find_gpus(visible, parse_gpus(answer.text))
    if gpus is None:
        return f"Cores are not bound: nvidia-smi does not list all of CUDA_VISIBLE_DEVICES = {','.join(visible)}."
    folders = [sysfs / "bus/pci/devices" / gpu.pci_address for gpu in gpus]
    near = {core for folder in folders for core in parse_cpulist(_read(folder / "local_cpulist"))}
    allowed = os.sched_getaffinity(0)
    cores, where = near & allowed, "those near " + ", ".join(gpu.pci_address for gpu in gpus)
    if cores == allowed:
        return ""
    num_threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "16,1" also limits nested teams
    if len(cores) < (int(num_threads) if num_threads.isdecimal() else 1):
        return f"Cores are not bound: only {len(cores)} of {len(allowed)} are {where}."
    try:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(thread.name), cores)
    except OSError as error:  # a container may forbid it
        return f"Cores are not bound: {error.strerror}."
    return f"Bound to {len(cores)} of {len(allowed)} cores: {where}."


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the numbers or UUIDs of CUDA_VISIBLE_DEVICES, by which Ray assigns GPUs to an actor."""
    words = (word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    return [word for word in words if word not in ("", "-1")]


def parse_cpulist(text: str) -> set[int]:
    """Parse a CPU list of the kernel.

    >>> sorted(parse_cpulist("0-2,8"))
    [0, 1, 2, 8]
    """
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    """Return the text of a sysfs file; "" if it cannot be read: cores are then not bound."""
    try:
        return path.read_text()
    except OSError:  # Not only a missing file: a driver answers ENODEV, ENXIO or EINVAL.
        return ""
