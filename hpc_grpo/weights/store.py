"""The weight store: one node's copy of the published weights, in shared memory.

The publishing learner writes a version; the node's engine workers read it in place. The store is created once
and reused: its pages are allocated up front, because the first touch of shared memory costs seconds a GiB and
a full /dev/shm must fail here with a message, not later with SIGBUS.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import xxhash

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.weights.buckets import Bucket, BucketLayout


@dataclass(frozen=True)
class StoredVersion:
    """A version in the store: which of its buffers holds it, and a checksum for each bucket.

    Checksums are xxh3 keyed by the run, cut to 63 bits: signed 64-bit tensors carry them.
    """

    version: int
    buffer: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class StoreSpec:
    """The layout that all members agree on. `key` seeds the checksums, so that only the run's own bytes pass."""

    layout: BucketLayout
    num_buffers: int
    key: int


class WeightStore:
    """A process's view of the node's buffers; the publisher creates them, the workers open them."""

    def __init__(self, folder: Path, spec: StoreSpec, *, create: bool) -> None:
        self.layout = spec.layout
        self.num_buffers = spec.num_buffers
        self._folder = folder
        self._key = spec.key
        self._buffers = [self._map(index, create) for index in range(spec.num_buffers)]

    def tensors(self, buffer: int, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter of a bucket by name, as a view of shared memory in its shape and dtype."""
        for slot in bucket.slots:
            raw = self._buffers[buffer][slot.offset : slot.offset + slot.num_bytes]
            yield slot.spec.name, raw.view(getattr(torch, slot.spec.dtype)).view(slot.spec.shape)

    def checksum(self, buffer: int, bucket: Bucket) -> int:
        raw = self._buffers[buffer][bucket.start : bucket.end].numpy()
        return xxhash.xxh3_64_intdigest(memoryview(raw), seed=self._key) >> 1

    def verify(self, stored: StoredVersion) -> None:
        """Raise a WeightSyncError that names the first bucket whose bytes are not those announced."""
        for index, (bucket, announced) in enumerate(zip(self.layout.buckets, stored.checksums, strict=True)):
            found = self.checksum(stored.buffer, bucket)
            if found != announced:
                raise WeightSyncError(
                    f"checksum mismatch in bucket {index} of weight version {stored.version} "
                    f"({bucket.names[0]} … {bucket.names[-1]}): announced {announced:#x}, found {found:#x}"
                )

    def publish_header(self, stored: StoredVersion) -> None:
        """Record which version every engine of the node holds, for one that takes a dead one's place."""
        write_json_atomic(self._header, asdict(stored))

    def current(self) -> StoredVersion:
        header = json.loads(self._header.read_text())
        return StoredVersion(header["version"], header["buffer"], tuple(header["checksums"]))

    @property
    def _header(self) -> Path:
        return self._folder / "current.json"

    def _map(self, index: int, create: bool) -> torch.Tensor:
        path = self._folder / f"weights-{index}.bin"
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
