"""Keep a process on the cores next to its GPUs where a node is several NUMA nodes: a GH200 node is four of 72 cores.

Nothing else does: job steps run with --cpu-bind=none, and Ray leaves an actor every core. Memory follows: Linux takes a
page from the NUMA node of the core that touches it first. A library's threads, and an engine's tensor-parallel workers,
inherit the cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hpc_grpo.system.commands import Answer, run_command


def list_gpus() -> Answer:
    """Ask nvidia-smi, which touches no GPU: CUDA in this process would keep it from forking workers that use it."""
    return run_command(["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"])


def keep_near_gpus(
    environ: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys"), list_gpus: Callable[[], Answer] = list_gpus
) -> str:
    """Bind this process to the cores near the GPUs of CUDA_VISIBLE_DEVICES; return a line on it, "" if all may stay.

    Stays within the process's own cores, those of its cgroup's cpuset. Leaves the process alone where these are too few
    for its OMP_NUM_THREADS: slow memory costs less than threads that wait for each other.
    """
    visible = visible_gpus(environ)
    if not visible or len(parse_cpulist(_read(sysfs / "devices/system/node/has_cpu"))) < 2:
        return ""
    answer = list_gpus()
    if answer.error:
        return f"Cores are not bound: {answer.error}."
    addresses = find_gpus(visible, answer.text)
    if len(addresses) != len(visible):
        return f"Cores are not bound: nvidia-smi does not list all of CUDA_VISIBLE_DEVICES = {','.join(visible)}."
    lists = (_read(sysfs / "bus/pci/devices" / address / "local_cpulist") for address in addresses)
    near = {core for cpulist in lists for core in parse_cpulist(cpulist)}
    allowed = os.sched_getaffinity(0)
    cores, where = near & allowed, "those near " + ", ".join(addresses)
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
    """Return the numbers or UUIDs of CUDA_VISIBLE_DEVICES, by which Ray gives an actor its GPUs."""
    return [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]


def find_gpus(visible: list[str], listed: str) -> list[str]:
    """Return the folders in sysfs of the GPUs that are named by number or by the start of a UUID.

    `listed` is what `list_gpus` prints, with eight digits for PCI domains; sysfs has four, in small letters. CUDA and
    nvidia-smi both count by PCI address, where a node's GPUs are of one kind.

    >>> find_gpus(["GPU-1"], "0, GPU-1a, 00000009:01:00.0")
    ['0009:01:00.0']
    """
    rows = [[field.strip() for field in line.split(",")] for line in listed.splitlines()]
    gpus = [row for row in rows if len(row) == 3]  # not "No devices were found"
    found = [address for name in visible for index, uuid, address in gpus if name == index or uuid.startswith(name)]
    return [address.lower()[-len("0009:01:00.0") :] for address in found]


def parse_cpulist(text: str) -> set[int]:
    """Read a list as the kernel writes them.

    >>> sorted(parse_cpulist("0-2,8"))
    [0, 1, 2, 8]
    """
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    """Return the text of a file of sysfs; "" where this kernel or container has none: cores are then not bound."""
    try:
        return path.read_text()
    except OSError:  # not only a missing file: a driver answers with ENODEV, ENXIO or EINVAL
        return ""
