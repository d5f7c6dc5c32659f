"""The weight store: one node's copy of the published weights, in shared memory.

The publishing learner writes a version; the node's engine workers read it in place. The store is created once, while
engines start, and reused: its pages are allocated up front, because the first touch of shared memory costs seconds a
GiB and a full /dev/shm must fail here with a message, not later with SIGBUS.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.types import DTYPE_BYTES
from hpc_grpo.weights.buckets import Block, Bucket, BucketLayout, Slot

_PIECE_BYTES = 512 * 1024
"""What is copied and then read for its checksum while it is still in a core's cache."""


@dataclass(frozen=True)
class StoredVersion:
    """A version in the store, with a checksum for each block.

    Checksums are xxh3 keyed by the run, cut to 63 bits: signed 64-bit tensors carry them.
    """

    version: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class StoreSpec:
    """The layout that all members agree on. `key` seeds the checksums, so that only the run's own bytes pass."""

    layout: BucketLayout
    key: int


class WeightStore:
    """A process's view of the node's store; the publisher creates it, the workers open it."""

    is_page_locked = False
    """Whether this process's GPU copies from and to the store itself."""

    def __init__(self, folder: Path, spec: StoreSpec, *, create: bool) -> None:
        self.layout = spec.layout
        self._folder = folder
        self._key = spec.key
        self.raw = self._map(create)

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter of a bucket by name, as a view of shared memory in its shape and dtype."""
        return views(self.raw, bucket)

    def write(self, block: Block, parameters: Mapping[str, torch.Tensor]) -> int:
        """Copy what lies in a block from `parameters` in host memory; return its checksum."""
        raw, digest = self.raw, xxhash.xxh3_64(seed=self._key)
        sources = [(slot, parameters[slot.spec.name].reshape(-1)) for slot in block.slots]
        for start in range(block.start, block.end, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, block.end)
            for slot, source in sources:
                first, last = max(start, slot.offset), min(end, slot.offset + slot.num_bytes)
                if first < last:
                    _copy(raw[first:last], source, slot, first - slot.offset)
            digest.update(memoryview(raw[start:end].numpy()))
        return digest.intdigest() >> 1

    def checksum(self, block: Block) -> int:
        raw = self.raw[block.start : block.end].numpy()
        return xxhash.xxh3_64_intdigest(memoryview(raw), seed=self._key) >> 1

    def verify(self, stored: StoredVersion, share: int = 0, num_shares: int = 1) -> None:
        """Compare one of `num_shares` equal shares of the blocks with what was announced.

        Raises a WeightSyncError that names the first bucket whose bytes differ.
        """
        announced_blocks = list(zip(self.layout.blocks, stored.checksums, strict=True))
        for block, announced in announced_blocks[share::num_shares]:
            found = self.checksum(block)
            if found != announced:
                within = (bucket.start <= block.start < bucket.end for bucket in self.layout.buckets)
                index = list(within).index(True)
                names = self.layout.buckets[index].names
                raise WeightSyncError(
                    f"checksum mismatch in bucket {index} of weight version {stored.version} "
                    f"({names[0]} … {names[-1]}): announced {announced:#x}, found {found:#x}"
                )

    def publish_header(self, stored: StoredVersion) -> None:
        """Record which version every engine of the node holds, for one that takes a dead one's place."""
        write_json_atomic(self._header, asdict(stored))

    def current(self) -> StoredVersion:
        header = json.loads(self._header.read_text())
        return StoredVersion(header["version"], tuple(header["checksums"]))

    @property
    def _header(self) -> Path:
        return self._folder / "current.json"

    def _map(self, create: bool) -> torch.Tensor:
        path = self._folder / "weights.bin"
        size = max(self.layout.num_bytes, 1)
        descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.posix_fallocate(descriptor, 0, size)
            view = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            raise WeightSyncError(
                f"The weight store needs {size / 2**30:.2f} GiB in {self._folder}: {error.strerror}. "
                f"Free shared memory, or lower launch.object_store_gib."
            ) from error
        finally:
            os.close(descriptor)
        return torch.frombuffer(view, dtype=torch.uint8)


def views(raw: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of a bucket by name, as a view of `raw`, which holds a version's bytes."""
    for slot in bucket.slots:
        own = raw[slot.offset : slot.offset + slot.num_bytes]
        yield slot.spec.name, own.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape)


def _copy(target: torch.Tensor, source: torch.Tensor, slot: Slot, offset: int) -> None:
    """Copy a part of a flat parameter, `offset` bytes into its slot, to the bytes of `target`."""
    dtype = getattr(torch, slot.spec.dtype)
    if source.dtype == dtype:
        part = source.view(torch.uint8)[offset : offset + len(target)]
        np.copyto(target.numpy(), part.numpy())  # torch's copy would start threads of its own in every thread
    else:
        first, size = offset // DTYPE_BYTES[slot.spec.dtype], DTYPE_BYTES[slot.spec.dtype]
        target.view(dtype).copy_(source[first : first + len(target) // size])
