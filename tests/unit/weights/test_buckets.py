from __future__ import annotations

from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.store import BucketLayout, bucket_layout
from tests.support.parameters import SPECS


def test_buckets_hold_every_parameter_once_and_in_order(layout: BucketLayout) -> None:
    assert [bucket.names for bucket in layout.buckets] == [("embed", "norm"), ("head", "bias")]
    assert list(layout.specs) == SPECS


def test_slots_are_aligned_and_do_not_overlap(layout: BucketLayout) -> None:
    slots = [slot for bucket in layout.buckets for slot in bucket.slots]
    assert [slot.num_bytes for slot in slots] == [240, 6, 240, 2]
    assert all(slot.offset % 64 == 0 for slot in slots)
    ends = [slot.offset + slot.num_bytes for slot in slots]
    assert all(end <= following.offset for end, following in zip(ends, slots[1:], strict=False))
    assert layout.num_bytes == layout.buckets[-1].end >= ends[-1]
    assert all(left.end == right.start for left, right in zip(layout.buckets, layout.buckets[1:], strict=False))


def test_larger_parameter_has_a_bucket_of_its_own() -> None:
    specs = [ParameterSpec(name, (size,), "float32") for name, size in [("a", 4), ("b", 1000), ("c", 4), ("d", 4)]]
    assert [bucket.names for bucket in bucket_layout(specs, 256).buckets] == [("a",), ("b",), ("c", "d")]


def test_blocks_cover_their_buckets_without_gaps_and_name_what_reaches_into_them() -> None:
    sizes = {"a": 10, "b": 9 * 2**20, "c": 3 * 2**20}
    layout = bucket_layout([ParameterSpec(name, (size,), "float32") for name, size in sizes.items()], 24 * 2**20)
    assert [bucket.names for bucket in layout.buckets] == [("a",), ("b",), ("c",)]
    assert [len(bucket.blocks) for bucket in layout.buckets] == [1, 3, 1]
    assert [slot.spec.name for block in layout.blocks for slot in block.slots] == ["a", "b", "b", "b", "c"]
    ends = [0, *(block.end for block in layout.blocks)]
    assert [block.start for block in layout.blocks] == ends[:-1]
    assert ends[-1] == layout.num_bytes


def test_a_layout_of_no_parameters_is_empty() -> None:
    empty = bucket_layout([], 256)
    assert (empty.num_bytes, empty.blocks) == (0, ())
