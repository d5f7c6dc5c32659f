"""The learners' process group, and the store through which its ranks meet.

The group is created before DeepSpeed, which adopts it. DeepSpeed alone would read rank and address from environment
variables, listen on every interface, and compile a shared-memory kernel at its first start on a CPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""A learner may wait this long for the others. NCCL's own default for a new group is 10 minutes."""


class RendezvousStore(dist.Store):  # type: ignore[misc]
    """The `Rendezvous` actor as a store of torch.distributed. `call(method, *args)` calls a method of the actor.

    Reads wait up to the store's timeout. torch also calls the store from its own threads. The caller must keep a
    reference to this object, because torch holds only the C++ part of a store.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return self._wait([key], self.timeout)[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, self.timeout if timeout is None else timeout)

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._call("compare_set", key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("has", keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._call("delete", key))

    def clone(self) -> RendezvousStore:
        """Return another view of the same rendezvous. torch calls this when it splits a group."""
        return RendezvousStore(self._call)

    deleteKey = delete_key  # noqa: N815 - torch looks the method up under the name of its C++ interface

    def _wait(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        values: list[bytes] | None = self._call("get", keys, timeout.total_seconds())
        if values is None:
            raise dist.DistStoreError(f"There is no value of {', '.join(keys)} after {timeout.total_seconds():.0f} s.")
        return values


def init_process_group(rank: int, world_size: int, device: torch.device, store: Any = None) -> None:
    """Create the default group (Gloo on CPU, NCCL on a GPU) and make DeepSpeed use it.

    An existing group of the same rank and size is kept. A single learner needs no store and opens only loopback ports.
    Raises ValueError if `world_size` > 1 has no store, or if the process belongs to another group.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(f"this process is already rank {dist.get_rank()} of {dist.get_world_size()}")
        return
    is_cuda = device.type == "cuda"
    if store is None:
        if world_size > 1:
            raise ValueError(f"a group of {world_size} learners needs a store")
        store = dist.HashStore()
        if "lo" in {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if is_cuda else None,
    )
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    # Overwrite the variables: another launcher around this process may have set other ranks.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(device.index or 0))
    import deepspeed

    if not is_cuda:
        # Keep DeepSpeed from compiling its shared-memory collectives: it reads in this table what it can compile. That
        # would take 25 s, and the lock file of a killed compilation would hang the next start.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    deepspeed.comm.init_distributed()


def of_all_ranks(rows: Tensor, every: int = 1) -> Tensor:
    """Concatenate the columns of `rows` `[K, n]` of each `every`-th rank; n may differ. A collective of all ranks."""
    world_size = dist.get_world_size()
    if world_size == 1:
        return rows
    counts = torch.zeros(world_size, dtype=torch.int64, device=rows.device)
    counts[dist.get_rank()] = rows.shape[1]
    dist.all_reduce(counts)
    sizes = counts.tolist()
    padded = rows.new_zeros(rows.shape[0], max(sizes))
    padded[:, : rows.shape[1]] = rows
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)][::every], dim=1)
