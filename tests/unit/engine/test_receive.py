"""What crosses from vLLM's workers, and their parameters' shapes as the model's files have them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.node_group import GroupMembership
from hpc_grpo.weights.store import StoredVersion, StoreSpec, bucket_layout

pytest.importorskip("vllm")

import torch
from vllm.config import VllmConfig, get_current_vllm_config

from hpc_grpo.engine import receive
from hpc_grpo.engine.receive import WeightReceiver, adapter_differences, catching, unsharded_shape
from hpc_grpo.engine.sampler import Sampler


class Module:
    """A layer of vLLM's, with the attributes that tell how it is sharded."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Worker:
    @catching
    def receive(self, version: int) -> int:
        if version == 3:
            raise WeightSyncError("checksum mismatch in bucket 0")
        if version == 4:
            raise RuntimeError("CUDA out of memory")
        return version


def received(*versions: int) -> Any:
    """Let a worker for each version receive it."""
    rpc = Module(collective_rpc=lambda method, args: [getattr(Worker(), method)(version) for version in args])
    return Sampler(rpc, []).on_workers("receive", *versions)


def test_weight_sync_error_is_raised_where_the_results_arrive() -> None:
    with pytest.raises(WeightSyncError, match=r"^checksum mismatch in bucket 0$"):
        received(2, 3)


def test_results_and_other_errors_pass_unchanged() -> None:
    assert received(1, 2) == [1, 2]
    with pytest.raises(RuntimeError, match="out of memory"):
        received(4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_vocabulary_padding_of_the_engine_is_not_a_difference(world_size: int) -> None:
    """vLLM pads 100 tokens to 128 rows, and a tensor-parallel rank holds its part of them."""
    module = Module(org_vocab_size=100)
    assert unsharded_shape(module, (128 // world_size, 8), world_size) == (100, 8)


def test_sharded_linears_are_compared_whole() -> None:
    column = Module(output_size=16, input_size=8)
    assert unsharded_shape(column, (8, 8), 2) == (16, 8)
    assert unsharded_shape(column, (8,), 2) == (16,)
    assert unsharded_shape(Module(), (8,), 2) == (8,)


def test_kv_heads_that_ranks_hold_copies_of_count_once() -> None:
    """12 query heads and 2 of keys and values on 4 ranks, as Qwen2.5-1.5B has: each rank holds 3 + 1 + 1 heads."""
    heads = {"total_num_heads": 12, "total_num_kv_heads": 2, "head_size": 4, "v_head_size": 4}
    qkv = Module(output_size=(12 + 4 + 4) * 4, input_size=8, **heads)
    assert unsharded_shape(qkv, (5 * 4, 8), 4) == ((12 + 2 + 2) * 4, 8)
    assert unsharded_shape(qkv, (5 * 4,), 4) == ((12 + 2 + 2) * 4,)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_are_compared_whole_and_without_padding(ranks: int) -> None:
    """Four experts of 6 channels of 10, of which a kernel makes 8 of 16 on one rank, and 4 of 16 on each of two."""
    share = 8 // ranks
    experts = Module(
        num_logical_experts=4, intermediate_size=6, intermediate_size_per_partition=share, hidden_dim=16,
        hidden_dim_unpadded=10,
    )  # fmt: skip
    module = Module(moe_config=experts)
    assert unsharded_shape(module, (4, 2 * share, 16), ranks) == (4, 12, 10)
    assert unsharded_shape(module, (4, 16, share), ranks) == (4, 10, 6)


class AskingModel(torch.nn.Module):
    """A model of which some layer, as those with quantised weights do, asks for vLLM's current config to load."""

    def load_weights(self, pairs: Iterable[Any]) -> None:
        self.loaded = list(pairs)
        self.config = get_current_vllm_config()


class NodesStore:
    """A node's weight store with one bucket of one tensor; it keeps which versions were verified."""

    layout = bucket_layout([ParameterSpec("weight", (1,), "float32")], 64)

    def __init__(self) -> None:
        self.verified: list[int] = []

    def verify(self, stored: StoredVersion) -> None:
        self.verified.append(stored.version)

    def tensors(self, bucket: Any) -> Iterable[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(1)


def test_weights_are_loaded_under_the_config_that_vllm_loads_them_under() -> None:
    receiver, model, config = WeightReceiver(), AskingModel(), VllmConfig()
    receiver.model_runner, receiver.vllm_config = Module(get_model=lambda: model), config
    receiver._hpc_grpo_store = NodesStore()
    receiver._hpc_grpo_load(StoredVersion(1, ()), is_verified=True)
    assert model.config is config
    assert [name for name, _ in model.loaded] == ["weight"]


class Announcing:
    """A node's group in which the publisher announces one version."""

    def __init__(self, announced: StoredVersion) -> None:
        self.announced = announced
        self.acknowledged: list[int] = []

    def receive_announcement(self, num_blocks: int) -> StoredVersion:
        assert num_blocks == 1
        return self.announced

    def acknowledge(self, loaded_version: int) -> None:
        self.acknowledged.append(loaded_version)


@pytest.mark.parametrize(
    ("verified", "in_the_pause"),
    [
        (StoredVersion(4, (7,)), []),
        (StoredVersion(4, (8,)), [4]),
        (StoredVersion(2, (7,)), [4]),
        (None, [4]),
    ],
    ids=["the same", "other bytes", "another version", "nothing"],
)
def test_only_the_very_version_that_was_verified_is_loaded_as_it_is(
    verified: StoredVersion | None, in_the_pause: list[int]
) -> None:
    receiver, store, group = WeightReceiver(), NodesStore(), Announcing(StoredVersion(4, (7,)))
    receiver.model_runner, receiver.vllm_config = Module(get_model=AskingModel), VllmConfig()
    receiver._hpc_grpo_store, receiver._hpc_grpo_group = store, group
    receiver.hpc_grpo_receive(4, verified)
    assert store.verified == in_the_pause
    assert group.acknowledged == [4]


def test_a_version_is_acknowledged_when_the_gpu_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher may write the buffer again then."""
    receiver, store, group = WeightReceiver(), NodesStore(), Announcing(StoredVersion(4, (7,)))
    receiver.model_runner, receiver.vllm_config = Module(get_model=AskingModel), VllmConfig()
    receiver._hpc_grpo_store, receiver._hpc_grpo_group = store, group
    acknowledged_before: list[list[int]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: acknowledged_before.append([*group.acknowledged]))
    receiver.hpc_grpo_receive(4, None)
    assert acknowledged_before == [[]]
    assert group.acknowledged == [4]


def test_the_next_drivers_store_meets_the_buffer_on_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch keeps the memory of an old one for itself, so that a new one would seem not to fit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    opened: list[int] = []

    def open_store(folder: Path, spec: StoreSpec, create: bool) -> Any:
        opened.append(spec.key)
        return Module(is_page_locked=True)

    monkeypatch.setattr(receive, "open_store", open_store)
    for name in ("StagedOnGpu", "NodeGroup"):
        monkeypatch.setattr(receive, name, lambda *_: object())
    receiver = WeightReceiver()
    parallel, model = Module(rank=0, tensor_parallel_size=1), Module(enable_sleep_mode=False)
    receiver.vllm_config = Module(parallel_config=parallel, model_config=model)
    on_gpu = set()
    for key in (1, 1, 2):
        spec = StoreSpec(NodesStore.layout, key)
        receiver.hpc_grpo_join(GroupMembership(Path("/dev/shm/x"), 1, 2, 20.0), spec)
        on_gpu.add(id(receiver._hpc_grpo_on_gpu))
    assert (opened, len(on_gpu)) == ([1, 2], 1)


def test_an_adapters_layers_that_the_engine_has_none_for_are_listed() -> None:
    """vLLM would leave them out in silence."""
    fused = "model.layers.0.self_attn.qkv_proj"
    parts = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    manager = Module(modules={fused: None, "model.layers.0.self_attn.o_proj": None}, packed_modules={fused: parts})
    names = [f"base_model.model.model.layers.0.{name}.lora_A.weight" for name in ("self_attn.q_proj", "mlp.up_proj")]
    (line,) = adapter_differences([ParameterSpec(name, (4, 8), "float32") for name in names], manager)
    assert line.startswith(f"{names[1]}: the learner publishes it")
