"""Keep a process on the cores next to its GPUs where a node is several NUMA nodes: a GH200 node is four of 72 cores.

Nothing else does: steps of a job run with --cpu-bind=none, and Ray chooses a process's GPUs but leaves it every core.
Its memory follows: Linux takes a page from the NUMA node of the core that touches it first. Threads that a library
starts, and an engine's tensor-parallel workers, inherit the cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpc_grpo.system.commands import Answer, run_command


@dataclass(frozen=True)
class ListedGpu:
    """A GPU as nvidia-smi lists it; `pci_address` is its folder's name in sysfs."""

    index: str
    uuid: str
    pci_address: str


def list_gpus() -> Answer:
    """Ask nvidia-smi, which touches no GPU: CUDA in this process would keep it from forking workers that use it."""
    return run_command(["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"])


def keep_near_gpus(
    environ: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys"), list_gpus: Callable[[], Answer] = list_gpus
) -> str:
    """Bind this process to the cores near the GPUs of CUDA_VISIBLE_DEVICES; return a line on it, "" if all may stay.

    Stays within the cores that the process has, those of its cgroup's cpuset. Leaves it alone where these are too few
    for its OMP_NUM_THREADS: slow memory costs less than threads that wait for each other.
    """
    visible = visible_gpus(environ)
    if not visible or len(parse_cpulist(_read(sysfs / "devices/system/node/has_cpu"))) < 2:
        return ""
    answer = list_gpus()
    if answer.error:
        return f"Cores are not bound: {answer.error}."
    gpus = find_gpus(visible, parse_gpus(answer.text))
    if gpus is None:
        return f"Cores are not bound: nvidia-smi does not list all of CUDA_VISIBLE_DEVICES = {','.join(visible)}."
    near = {core for gpu in gpus for core in parse_cpulist(_read(_pci_folder(sysfs, gpu) / "local_cpulist"))}
    allowed = os.sched_getaffinity(0)
    cores, where = near & allowed, "those near " + ", ".join(gpu.pci_address for gpu in gpus)
    if cores == allowed:
        return ""
    num_threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "16,1": of nested teams too
    if len(cores) < (int(num_threads) if num_threads.isdecimal() else 1):
        return f"Cores are not bound: only {len(cores)} of {len(allowed)} are {where}."
    try:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.sched_setaffinity(int(thread.name), cores)
    except OSError as error:  # a container may forbid it
        return f"Cores are not bound: {error.strerror}."
    return f"Bound to {len(cores)} of {len(allowed)} cores: {where}."


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the numbers or UUIDs of CUDA_VISIBLE_DEVICES, in which Ray tells an actor its GPUs."""
    return [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]


def parse_gpus(text: str) -> list[ListedGpu]:
    """Read what `list_gpus` prints. Its PCI domains have eight digits, those in sysfs four, in small letters.

    >>> parse_gpus("0, GPU-1a, 00000009:01:00.0")
    [ListedGpu(index='0', uuid='GPU-1a', pci_address='0009:01:00.0')]
    """
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    # It may say other things too, such as "No devices were found".
    return [ListedGpu(row[0], row[1], row[2].lower()[-len("0009:01:00.0") :]) for row in rows if len(row) == 3]


def find_gpus(visible: Sequence[str], listed: Sequence[ListedGpu]) -> list[ListedGpu] | None:
    """Return the GPUs that CUDA_VISIBLE_DEVICES names by number or by the start of a UUID; None if one is not listed.

    CUDA counts as nvidia-smi does, by PCI address, where a node's GPUs are of one kind.
    """
    found = [gpu for name in visible for gpu in listed if name == gpu.index or gpu.uuid.startswith(name)]
    return found if len(found) == len(visible) else None


def parse_cpulist(text: str) -> set[int]:
    """Read a list as the kernel writes them.

    >>> sorted(parse_cpulist("0-2,8"))
    [0, 1, 2, 8]
    """
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def _pci_folder(sysfs: Path, gpu: ListedGpu) -> Path:
    return sysfs / "bus/pci/devices" / gpu.pci_address


def _read(path: Path) -> str:
    """Return the text of a file of sysfs; "" where this kernel or container has none: cores are then not bound."""
    try:
        return path.read_text()
    except OSError:  # not only that it is not there: a driver answers with ENODEV, ENXIO or EINVAL
        return ""
