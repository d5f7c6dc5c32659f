"""Measure collectives between nodes: `python -m hpc_grpo.preflight.torch_probe '{"rank": 0, …}'`, a process on each.

The only program of the doctor that imports torch. Reads the arguments of `main` in JSON. Prints a JSON line after each
step. The last has the bandwidth of an all-reduce over Gloo, and over NCCL if torch sees a GPU, with NCCL's version.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

_REPEATS = 3
_NCCL_BYTES_FACTOR = 16
"""Enlarges the tensor for NCCL: to measure a faster network takes a larger tensor."""


def main(rank: int, world_size: int, host: str, port: int, num_bytes: int, timeout_s: float) -> None:
    """Measure, as one rank, the speed of an all-reduce of `num_bytes`. `host` and `port`: rank 0's store."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    store = _rendezvous(host, port, timeout, is_first=rank == 0)
    found: dict[str, Any] = {"sees_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}
    found |= nccl_in_use()
    print(json.dumps(found), flush=True)
    backends = ("gloo", "nccl") if found["sees_gpus"] else ("gloo",)
    for backend in backends if world_size > 1 else ():
        prefixed = dist.PrefixStore(backend, store)
        dist.init_process_group(backend, rank=rank, world_size=world_size, store=prefixed, timeout=timeout)
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        factor = _NCCL_BYTES_FACTOR if backend == "nccl" else 1
        seconds = _all_reduce_s(torch.zeros(num_bytes * factor // 4, device=device))
        found |= nccl_in_use()  # NCCL loads its plugin with its first group
        found[f"{backend}_gb_per_s"] = bus_gb_per_s(num_bytes * factor, world_size, seconds)
        # Print this now: a later step may hang.
        print(json.dumps(found), flush=True)
        dist.barrier()  # the store is rank 0's; it must outlive the others
        dist.destroy_process_group()


def nccl_in_use() -> dict[str, str]:
    """Return NCCL's version, its library and its network plugin in this process; "" for missing ones."""
    import torch
    import torch.distributed as dist

    version = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else ""
    maps = Path("/proc/self/maps").read_text()
    # The plugin's name begins with "libnccl-net": aws-ofi-nccl installs libnccl-net.so and libnccl-net-ofi.so.
    plugin = mapped_library("libnccl-net", maps)
    return {"nccl_version": version, "nccl_library": mapped_library("libnccl.so", maps), "nccl_plugin": plugin}


def mapped_library(prefix: str, maps: str) -> str:
    """Return the path of the mapped file whose name begins with `prefix`; `maps` is a /proc/PID/maps.

    >>> mapped_library("libnccl.so", "7f0000-7f1000 r-xp 00000000 08:01 42    /opt/nccl/lib/libnccl.so.2")
    '/opt/nccl/lib/libnccl.so.2'
    """
    paths = [fields[5] for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6]
    return next((path for path in paths if Path(path).name.startswith(prefix)), "")


def _rendezvous(host: str, port: int, timeout: timedelta, *, is_first: bool) -> Any:
    """Return the store of rank 0, which listens on the named address alone."""
    import torch.distributed as dist

    if not is_first:
        return dist.TCPStore(host, port, is_master=False, timeout=timeout)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, port))
        listener.listen()
        # The store takes the descriptor over, so the socket object must not close it.
        options = {"wait_for_workers": False, "timeout": timeout, "master_listen_fd": listener.detach()}
        return dist.TCPStore(host, port, is_master=True, **options)


def bus_gb_per_s(num_bytes: int, world_size: int, seconds: float) -> float:
    """Return the bus bandwidth of a ring all-reduce in 10^9 bytes per second: the rate at which one node sends.

    >>> bus_gb_per_s(2_000_000_000, 2, 2.0)
    1.0
    """
    return 2 * (world_size - 1) / world_size * num_bytes / seconds / 1e9


def _all_reduce_s(tensor: Any) -> float:
    """Return the seconds of one all-reduce, the fastest of a few."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        begun = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    once()  # connections are made here
    return min(once() for _ in range(_REPEATS))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
