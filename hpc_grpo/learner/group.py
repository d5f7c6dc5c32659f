"""The learners' process group.

The group is set up before DeepSpeed, which adopts it. By itself DeepSpeed reads rank and address from environment
variables, listens on every interface, and compiles a shared-memory kernel on its first start on a CPU.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LOOPBACK = "lo"


def init_process_group(rank: int, world_size: int, device: Any, store: Any = None, timeout_s: float = 1800.0) -> None:
    """Create the default group (Gloo on CPU, NCCL on a GPU) and make DeepSpeed use it.

    When it exists already, with the same rank and size, it is kept. A single learner needs no store and opens no port
    beyond loopback. Raises ValueError without a store when `world_size` > 1, or when the process belongs to another
    group.
    """
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
            raise ValueError(f"this process is already rank {dist.get_rank()} of {dist.get_world_size()}")
        return
    is_cuda = torch.device(device).type == "cuda"
    if store is None:
        if world_size > 1:
            raise ValueError(f"a group of {world_size} learners needs a store")
        store = dist.HashStore()
        if _LOOPBACK in {name for _, name in socket.if_nameindex()}:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(device) if is_cuda else None,
    )
    _adopt_in_deepspeed(rank, world_size, device)


def of_all_ranks(rows: Tensor) -> Tensor:
    """Lay the columns of all ranks' `rows` `[K, n]` side by side; n may differ. A collective."""
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
    return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)


def _adopt_in_deepspeed(rank: int, world_size: int, device: Any) -> None:
    is_cuda = torch.device(device).type == "cuda"
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if is_cuda else "cpu")
    # Overwritten: the values of another launcher around us are those of other ranks.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(torch.device(device).index or 0))
    import deepspeed

    if not is_cuda:
        # DeepSpeed would otherwise compile its shared-memory collectives: 25 s, and a lock file that hangs the
        # next start if killed meanwhile. Compatible ops are a module-level table that is made to be edited.
        vars(deepspeed.ops)["__compatible_ops__"] = {}
    deepspeed.comm.init_distributed()
