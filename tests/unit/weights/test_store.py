from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.store import BucketLayout, StoredVersion, StoreSpec, WeightStore, bucket_layout
from tests.support.parameters import SPECS

KEY = 0x1234_5678_9ABC_DEF0 >> 1


def random_parameters(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype)) for spec in SPECS}


def fill(store: WeightStore, version: int, parameters: dict[str, torch.Tensor]) -> StoredVersion:
    return StoredVersion(version, tuple(store.write(block, parameters) for block in store.layout.blocks))


def read(store: WeightStore) -> dict[str, torch.Tensor]:
    return {name: view for bucket in store.layout.buckets for name, view in store.tensors(bucket)}


def test_what_was_written_is_read_by_another_process_bit_for_bit(layout: BucketLayout, tmp_path: Path) -> None:
    """Two views of the same files: what two processes have."""
    writer = WeightStore(tmp_path, StoreSpec(layout, KEY), create=True)
    reader = WeightStore(tmp_path, StoreSpec(layout, KEY), create=False)
    parameters = random_parameters(0)
    reader.verify(fill(writer, 4, parameters))
    for name, tensor in read(reader).items():
        assert torch.equal(tensor, parameters[name])
        assert tensor.dtype == parameters[name].dtype


LARGE = bucket_layout(
    [
        ParameterSpec("small", (7,), "bfloat16"),
        ParameterSpec("large", (9_000_001,), "bfloat16"),
        ParameterSpec("same", (5_000_001,), "float32"),
    ],
    bucket_bytes=24 * 2**20,
)
"""Parameters that reach over several blocks, whose ends are no block's, in two buckets of two blocks each."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[WeightStore, StoredVersion, dict[str, torch.Tensor]]:
    store = WeightStore(tmp_path_factory.mktemp("shm"), StoreSpec(LARGE, KEY), create=True)
    generator = torch.Generator().manual_seed(0)
    parameters = {spec.name: torch.randn(spec.shape, generator=generator) for spec in LARGE.specs}
    return store, fill(store, 1, parameters), parameters


def test_blocks_of_large_parameters_are_written_in_the_stores_precision(
    large: tuple[WeightStore, StoredVersion, dict[str, torch.Tensor]],
) -> None:
    store, _, parameters = large
    assert [len(bucket.blocks) for bucket in LARGE.buckets] == [2, 2]
    for name, view in read(store).items():
        assert torch.equal(view, parameters[name].to(view.dtype))


@pytest.mark.parametrize("num_shares", [1, 3, 4, 9])
def test_shares_together_verify_every_byte_once(
    large: tuple[WeightStore, StoredVersion, dict[str, torch.Tensor]], num_shares: int
) -> None:
    store, stored, _ = large
    for number, block in enumerate(LARGE.blocks):
        store.raw[block.end - 1] ^= 1
        found = []
        for share in range(num_shares):
            try:
                store.verify(stored, share, num_shares)
            except WeightSyncError as error:
                found.append((share, str(error)))
        store.raw[block.end - 1] ^= 1
        ((share, words),) = found
        assert share == number % num_shares
        assert f"in bucket {number // 2} of weight version 1" in words
        store.verify(stored, share, num_shares)


def test_the_store_holds_one_version(layout: BucketLayout, tmp_path: Path) -> None:
    store = WeightStore(tmp_path, StoreSpec(layout, KEY), create=True)
    first = fill(store, 1, random_parameters(1))
    store.verify(fill(store, 2, random_parameters(2)))
    with pytest.raises(WeightSyncError, match="checksum mismatch in bucket 0 of weight version 1"):
        store.verify(first)


@pytest.mark.parametrize("number", [0, 1])
def test_one_flipped_bit_is_found_and_its_bucket_named(layout: BucketLayout, tmp_path: Path, number: int) -> None:
    store = WeightStore(tmp_path, StoreSpec(layout, KEY), create=True)
    stored = fill(store, 3, random_parameters(0))
    bucket = layout.buckets[number]
    with (tmp_path / "weights.bin").open("r+b") as file:
        file.seek(bucket.slots[1].offset)
        (byte,) = file.read(1)
        file.seek(bucket.slots[1].offset)
        file.write(bytes([byte ^ 0x40]))
    words = f"checksum mismatch in bucket {number} of weight version 3 ({bucket.names[0]} … {bucket.names[-1]})"
    with pytest.raises(WeightSyncError, match=re.escape(words)):
        WeightStore(tmp_path, StoreSpec(layout, KEY), create=False).verify(stored)


def test_checksums_need_the_key_of_the_run(layout: BucketLayout, tmp_path: Path) -> None:
    stored = fill(WeightStore(tmp_path, StoreSpec(layout, KEY), create=True), 1, random_parameters(0))
    assert all(0 <= checksum < 2**63 for checksum in stored.checksums)
    with pytest.raises(WeightSyncError, match="checksum mismatch"):
        WeightStore(tmp_path, StoreSpec(layout, KEY + 1), create=False).verify(stored)


def test_current_version_is_what_was_published_last(layout: BucketLayout, tmp_path: Path) -> None:
    store = WeightStore(tmp_path, StoreSpec(layout, KEY), create=True)
    stored = StoredVersion(version=7, checksums=(1, 2**63 - 1))
    store.publish_header(stored)
    assert WeightStore(tmp_path, StoreSpec(layout, KEY), create=False).current() == stored


def test_store_is_the_users_alone_and_allocated_up_front(layout: BucketLayout, tmp_path: Path) -> None:
    WeightStore(tmp_path, StoreSpec(layout, KEY), create=True)
    stat = (tmp_path / "weights.bin").stat()
    assert stat.st_mode & 0o777 == 0o600
    assert stat.st_blocks * 512 >= layout.num_bytes


def test_full_shared_memory_is_told_with_the_remedy(
    layout: BucketLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int, _offset: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"No space left on device\. Free shared memory, or lower launch"):
        WeightStore(tmp_path, StoreSpec(layout, KEY), create=True)


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
