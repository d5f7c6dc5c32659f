"""Keep a process on the cores next to its GPUs if a node has several NUMA nodes: a GH200 node has four with 72 cores
each.

Nothing else does this. Steps of a job run with --cpu-bind=none, and Ray selects a process's GPUs but not its cores. Its
memory follows: Linux takes a page from the NUMA node of the core that first touches it. Threads of libraries, and an
engine's tensor-parallel workers, inherit the cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from hpc_grpo.system.commands import Answer
from hpc_grpo.system.gpus import ask_nvidia_smi, find_gpus, parse_gpus


def keep_near_gpus(
    environ: Mapping[str, str] = os.environ, sysfs: Path = Path("/sys"), ask: Callable[[], Answer] = ask_nvidia_smi
) -> str:
    """Bind this process to the cores near the GPUs of CUDA_VISIBLE_DEVICES. Return a line about it, "" for no change.

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
    num_threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # "16,1": of nested teams too
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
    return [word.strip() for word in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.strip()]


def parse_cpulist(text: str) -> set[int]:
    """Parse a CPU list of the kernel.

    >>> sorted(parse_cpulist("0-2,8"))
    [0, 1, 2, 8]
    """
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def _read(path: Path) -> str:
    """Return the text of a sysfs file; "" if the kernel or container has none, and cores are not bound."""
    try:
        return path.read_text()
    except OSError:  # Not only a missing file: a driver answers ENODEV, ENXIO or EINVAL.
        return ""
