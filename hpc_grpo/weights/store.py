"""The weight store: a node's copy of the published weights in shared memory, with the position of each parameter.

The publishing learner writes a version; the node's engine workers read it in place. The store is created once, while
engines start, and reused. All pages are allocated at creation: the first touch of shared memory costs seconds per GiB,
and a full /dev/shm must fail here with a message, not later with SIGBUS. The driver makes the layout once. So a publish
is one header and one copy, without a message per parameter.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.types import DTYPE_BYTES, ParameterSpec

if TYPE_CHECKING:
    import torch  # the driver, which makes the layout, does not import it

_ALIGNMENT_BYTES = 64  # a cache line: every parameter can be viewed in any dtype without a copy
_BUCKET_BYTES = 256 * 2**20  # gathered at once under ZeRO-3
_BLOCK_BYTES = 16 * 2**20  # small enough to share the work evenly, large enough for few checksums
_PIECE_BYTES = 512 * 1024  # copied, then read for its checksum while it is still in a core's cache

PUBLISHER_RANK = 0  # in a node's weight group


@dataclass(frozen=True)
class Slot:
    """A parameter's position: `offset` and `num_bytes` count from the start of the store."""

    spec: ParameterSpec
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Block:
    """A range of the store with its own checksum, written or verified by one thread; `[start, end)` in bytes.

    `slots` are the parameters that overlap the block. A parameter may span several blocks.
    """

    slots: tuple[Slot, ...]
    start: int
    end: int


class Bucket(Block):
    """The parameters that are gathered together, and the blocks that hold them."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.spec.name for slot in self.slots)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        blocks = []
        for start in range(self.start, self.end, _BLOCK_BYTES):
            end = min(start + _BLOCK_BYTES, self.end)
            slots = [slot for slot in self.slots if slot.offset < end and slot.offset + slot.num_bytes > start]
            blocks.append(Block(tuple(slots), start, end))
        return tuple(blocks)


@dataclass(frozen=True)
class BucketLayout:
    """The buckets of the published parameters, in the model's order; the adapter's with `lora.publish: adapter`."""

    buckets: tuple[Bucket, ...]

    @property
    def num_bytes(self) -> int:
        return self.buckets[-1].end if self.buckets else 0

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for bucket in self.buckets for block in bucket.blocks)

    @property
    def specs(self) -> Sequence[ParameterSpec]:
        return [slot.spec for bucket in self.buckets for slot in bucket.slots]


def bucket_layout(specs: Iterable[ParameterSpec], bucket_bytes: int = _BUCKET_BYTES) -> BucketLayout:
    """Fill buckets of about `bucket_bytes` in the given order. A larger parameter has its own bucket.

    >>> specs = [ParameterSpec("a", (4,), "float32"), ParameterSpec("b", (2, 2), "float32")]
    >>> [bucket.names for bucket in bucket_layout(specs, 64).buckets]
    [('a',), ('b',)]
    """
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    start = end = 0
    for spec in specs:
        num_bytes = prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        if slots and end + num_bytes - start > bucket_bytes:
            buckets.append(Bucket(tuple(slots), start, end))
            slots, start = [], end
        slots.append(Slot(spec, end, num_bytes))
        end += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if slots:
        buckets.append(Bucket(tuple(slots), start, end))
    return BucketLayout(tuple(buckets))


@dataclass(frozen=True)
class StoredVersion:
    """A version in the store, with a checksum for each block.

    Checksums are xxh3 keyed by the run, cut to 63 bits to fit signed 64-bit tensors. They prove that engines load the
    bytes that the learner wrote. The canary checks that engines sample from these bytes.
    """

    version: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class StoreSpec:
    """The layout of a store, equal in all processes. `key` seeds the checksums: bytes of another run do not pass."""

    layout: BucketLayout
    key: int


@dataclass(frozen=True)
class GroupMembership:
    """A process's place in its node's group (`node_group.py`). `generation` changes when a group is rebuilt."""

    folder: Path
    rank: int
    size: int
    deadline_s: float
    generation: int = 0


class WeightStore:
    """A process's view of the node's store. The publisher creates the store, the workers open it."""

    is_page_locked = False
    """Whether this process's GPU copies from and to the store directly."""

    def __init__(self, folder: Path, spec: StoreSpec, *, create: bool) -> None:
        self.layout = spec.layout
        self._header = folder / "current.json"
        self._key = spec.key
        self.raw = _mapped(folder / "weights.bin", spec.layout.num_bytes, create)

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter of a bucket by name, as a view of shared memory in its shape and dtype."""
        return views(self.raw, bucket)

    def write(self, block: Block, parameters: Mapping[str, torch.Tensor]) -> int:
        """Copy a block's bytes from `parameters` in host memory; return its checksum."""
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
        """Compare one of `num_shares` equal shares of the blocks with the announced checksums.

        Raises a WeightSyncError that names the first bucket whose bytes differ.
        """
        announced_blocks = list(zip(self.layout.blocks, stored.checksums, strict=True))
        for block, announced in announced_blocks[share::num_shares]:
            found = self.checksum(block)
            if found != announced:
                index = [bucket.end > block.start for bucket in self.layout.buckets].index(True)
                names = self.layout.buckets[index].names
                raise WeightSyncError(
                    f"checksum mismatch in bucket {index} of weight version {stored.version} "
                    f"({names[0]} … {names[-1]}): announced {announced:#x}, found {found:#x}"
                )

    def publish_header(self, stored: StoredVersion) -> None:
        """Record the version that every engine of the node has. A replacement engine loads this version."""
        write_json_atomic(self._header, asdict(stored))

    def current(self) -> StoredVersion:
        header = json.loads(self._header.read_text())
        return StoredVersion(header["version"], tuple(header["checksums"]))


def views(raw: torch.Tensor, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter of a bucket by name, as a view of `raw`, the bytes of a version."""
    import torch

    for slot in bucket.slots:
        own = raw[slot.offset : slot.offset + slot.num_bytes]
        yield slot.spec.name, own.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape)


def _mapped(path: Path, num_bytes: int, create: bool) -> torch.Tensor:
    size = max(num_bytes, 1)
    descriptor = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if create:
            os.posix_fallocate(descriptor, 0, size)
        view = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        raise WeightSyncError(
            f"The weight store needs {size / 2**30:.2f} GiB in {path.parent}: {error.strerror}. "
            f"Free shared memory, or lower launch.object_store_gib."
        ) from error
    finally:
        os.close(descriptor)
    import torch

    return torch.frombuffer(view, dtype=torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor, slot: Slot, offset: int) -> None:
    """Fill `target` with the bytes of a flat parameter from `offset` on; convert them to the slot's dtype."""
    import torch

    dtype, size = getattr(torch, slot.spec.dtype), DTYPE_BYTES[slot.spec.dtype]
    if source.dtype == dtype:
        part = source.view(torch.uint8)[offset : offset + len(target)]
        np.copyto(target.numpy(), part.numpy())  # torch's copy would start its own threads in every thread
    else:
        first = offset // size
        target.view(dtype).copy_(source[first : first + len(target) // size])
