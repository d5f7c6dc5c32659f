"""The engine's actor on a sampler whose groups end when a test says so, without vLLM and without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.engine import actor
from hpc_grpo.engine.actor import Engine
from hpc_grpo.errors import WeightSyncError
from hpc_grpo.types import (
    Completion,
    Episode,
    GroupRequest,
    GroupSamples,
    ParameterSpec,
    SamplingSpec,
)
from hpc_grpo.weights.node_group import GroupMembership
from hpc_grpo.weights.store import StoredVersion, StoreSpec, WeightStore, bucket_layout
from tests.support.configs import minimal_config

REQUESTS = [GroupRequest(ordinal, (1,), (0,), SamplingSpec(1)) for ordinal in range(3)]
LAYOUT = bucket_layout([ParameterSpec(name, (16,), "float32") for name in "abcd"], bucket_bytes=64)
SPEC = StoreSpec(LAYOUT, key=5)


class FakeSampler:
    """Queues completions; fails with `failure` where that is set."""

    failure: Exception | None = None

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.completions: dict[int, Future[Any]] = {}
        self.received: list[tuple[int, StoredVersion | None]] = []

    def has_work(self) -> bool:
        return False

    def drain(self) -> None:
        pass

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure

    def add(self, requests: Sequence[GroupRequest]) -> list[Future[Any]]:
        self.raise_failure()
        futures = {request.ordinal: Future[Any]() for request in requests}
        self.completions |= futures
        self.calls.append([request.ordinal for request in requests])  # last: tests wait for it on another thread
        return list(futures.values())

    def forget_requests(self) -> None:
        for completion in self.completions.values():
            if not completion.done():
                completion.set_exception(RuntimeError("the driver that asked for it is gone"))

    def on_workers(self, method: str, *_: Any) -> list[None]:
        assert method == "hpc_grpo_join"
        return [None]

    def receive_weights(self, version: int, _probe: Any, verified: StoredVersion | None) -> None:
        self.received.append((version, verified))


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
    own = FakeSampler()
    monkeypatch.setattr(actor, "start_vllm", lambda *_, **__: None)
    monkeypatch.setattr(actor, "Sampler", lambda *_: own)
    monkeypatch.setattr(actor, "dump_stacks_on_signal", lambda _: None)
    return own


def completion(token: int) -> Completion:
    tokens = np.array([token], dtype=np.int32)
    return Completion(tokens, np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int32), "length")


def tokens_of(samples: tuple[GroupSamples, None]) -> list[list[int]]:
    def of(episode: Episode) -> list[int]:
        [turn] = episode.turns
        return turn.token_ids.tolist()

    return [of(episode) for episode in samples[0].episodes]


async def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def make_engine(tensor_parallel: int = 1) -> Engine:
    config = minimal_config(engine={"tensor_parallel": tensor_parallel})
    return Engine(config, (), on_gpu=False)


def test_groups_are_queued_in_one_go_and_had_one_by_one_as_they_end(sampler: FakeSampler) -> None:
    async def use() -> None:
        engine = make_engine()
        last = asyncio.ensure_future(engine.samples("a", 2))  # asked for before it is queued
        await engine.generate("a", REQUESTS)
        await until(lambda: sampler.calls == [[0, 1, 2]])
        sampler.completions[2].set_result(completion(2))
        assert tokens_of(await last) == [[2]]
        first = asyncio.ensure_future(engine.samples("a", 0))
        sampler.completions[0].set_result(completion(0))
        assert tokens_of(await first) == [[0]]
        sampler.completions[1].set_exception(RuntimeError("out of blocks"))
        with pytest.raises(RuntimeError, match="out of blocks"):
            await engine.samples("a", 1)

    asyncio.run(use())


def test_an_engine_whose_step_failed_queues_no_groups_and_is_not_ready(sampler: FakeSampler) -> None:
    async def use() -> None:
        engine = make_engine()
        await engine.ready()
        sampler.failure = RuntimeError("CUDA error")
        with pytest.raises(RuntimeError, match="CUDA error"):
            await engine.ready()
        await engine.generate("a", REQUESTS)
        for index in range(3):
            with pytest.raises(RuntimeError, match="CUDA error"):
                await engine.samples("a", index)

    asyncio.run(use())


def test_groups_of_a_driver_that_is_gone_are_kept_for_nobody(sampler: FakeSampler) -> None:
    async def use() -> None:
        engine = make_engine()
        waited_for = asyncio.ensure_future(engine.samples("a", 0))
        await engine.generate("a", REQUESTS)
        await until(lambda: sampler.calls)
        sampler.completions[1].set_result(completion(1))  # sampled, and not asked for when the driver died
        await engine.serve_next(engine._config)
        with pytest.raises(asyncio.CancelledError):
            await waited_for
        assert not engine._groups

    asyncio.run(use())


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    return WeightStore(tmp_path, SPEC, create=True)


async def second_of_two(store_folder: Path) -> Engine:
    """Return the second of two engines with two workers each: its shares are the blocks of c and d."""
    engine = make_engine(tensor_parallel=2)
    await engine.join_weight_group(GroupMembership(store_folder, 3, 5, 20.0), SPEC)
    return engine


def stage(store: WeightStore, version: int) -> StoredVersion:
    parameters = {spec.name: torch.full(spec.shape, float(version)) for spec in LAYOUT.specs}
    return StoredVersion(version, tuple(store.write(block, parameters) for block in LAYOUT.blocks))


def damage(store: WeightStore, name: str) -> None:
    (block,) = [block for block in LAYOUT.blocks if block.slots[0].spec.name == name]
    store.raw[block.start] ^= 1


def test_workers_are_told_what_the_engine_verified_beside_its_sampling(
    sampler: FakeSampler, store: WeightStore, tmp_path: Path
) -> None:
    staged = stage(store, 2)

    async def publish() -> None:
        engine = await second_of_two(tmp_path)
        await engine.verify_weights(staged)
        await engine.receive_weights(2)

    asyncio.run(publish())
    assert sampler.received == [(2, staged)]


@pytest.mark.parametrize("name", ["c", "d"])
def test_damage_in_a_share_of_the_engines_own_is_raised_and_nothing_counts_as_verified(
    sampler: FakeSampler, store: WeightStore, tmp_path: Path, name: str
) -> None:
    async def publish() -> None:
        engine = await second_of_two(tmp_path)
        await engine.verify_weights(stage(store, 2))
        staged = stage(store, 4)
        damage(store, name)
        with pytest.raises(WeightSyncError, match=f"weight version 4 \\({name} "):
            await engine.verify_weights(staged)
        await engine.receive_weights(4)

    asyncio.run(publish())
    assert sampler.received == [(4, None)]
