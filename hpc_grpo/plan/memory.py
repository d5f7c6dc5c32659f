"""Memory on one device as a sum of named parts."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_grpo.types import GIB


@dataclass(frozen=True)
class Part:
    """One line of a budget. `formula` says in the symbols of docs/memory.md how `num_bytes` came about."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True)
class MemoryBudget:
    """The parts that lie on one device at the same time, and what the device holds; both in bytes."""

    device: str
    parts: tuple[Part, ...]
    capacity_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def fits(self) -> bool:
        return self.num_bytes <= self.capacity_bytes


@dataclass(frozen=True)
class Hardware:
    """A node. `gpu_bytes` is one GPU's memory, `host_bytes` what a job may use of the node's.

    The other two are one GPU's peaks: dense bfloat16 arithmetic, and reading its memory.
    """

    gpu_bytes: int
    host_bytes: int
    gpu_flops_per_s: float = 989e12
    gpu_bytes_per_s: float = 4.0e12


GH200 = Hardware(gpu_bytes=96 * GIB, host_bytes=460 * GIB)
"""What is assumed where nothing else is said."""


def nonzero(*parts: Part) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.num_bytes)
