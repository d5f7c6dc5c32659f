"""The bucket layout: the place of each parameter in the weight store.

Made in the driver, once before the first publish, and in a learner at an export. With it every publish is one header
and one copy, without a message for each parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from hpc_grpo.types import DTYPE_BYTES, ParameterSpec

_ALIGNMENT_BYTES = 64
"""Cache-line alignment, so that every parameter can be viewed in any dtype without a copy."""

_BUCKET_BYTES = 256 * 2**20
_BLOCK_BYTES = 16 * 2**20
"""Enough blocks to share the work evenly, too few for their checksums to weigh."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place: `offset` and `num_bytes` count from the start of the store."""

    spec: ParameterSpec
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Bucket:
    """Parameters that are gathered together; `[start, end)` in bytes."""

    slots: tuple[Slot, ...]
    start: int
    end: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(slot.spec.name for slot in self.slots)

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        ends = [*range(self.start + _BLOCK_BYTES, self.end, _BLOCK_BYTES), self.end]
        spans = zip([self.start, *ends], ends, strict=False)
        return tuple(Block(self._slots_between(start, end), start, end) for start, end in spans)

    def _slots_between(self, start: int, end: int) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.offset < end and slot.offset + slot.num_bytes > start)


@dataclass(frozen=True)
class Block:
    """A stretch of a bucket with a checksum of its own: what one thread writes or verifies; `[start, end)` in bytes.

    `slots` are those that reach into it; a parameter may reach over several blocks.
    """

    slots: tuple[Slot, ...]
    start: int
    end: int


@dataclass(frozen=True)
class BucketLayout:
    """The buckets of the whole model, in the order of its parameters."""

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
    """Fill buckets of about `bucket_bytes` in the order given; a larger parameter has a bucket of its own.

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
