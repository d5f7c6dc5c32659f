"""The engine's actor on a sampler whose groups end when a test says so, without vLLM and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from hpc_grpo.engine import actor
from hpc_grpo.engine.actor import Engine
from hpc_grpo.types import GroupRequest, SamplingSpec
from tests.support.configs import minimal_config

REQUESTS = [GroupRequest(ordinal, (1,), (0,), SamplingSpec(1)) for ordinal in range(3)]


class FakeSampler:
    """Queues groups; fails with `failure` where that is set."""

    failure: Exception | None = None

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.groups: dict[int, Future[Any]] = {}

    def has_work(self) -> bool:
        return False

    def add_groups(self, requests: Sequence[GroupRequest]) -> list[Future[Any]]:
        if self.failure is not None:
            raise self.failure
        self.calls.append([request.ordinal for request in requests])
        futures = {request.ordinal: Future[Any]() for request in requests}
        self.groups |= futures
        return list(futures.values())


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> FakeSampler:
    own = FakeSampler()
    monkeypatch.setattr(actor, "start_vllm", lambda *_, **__: None)
    monkeypatch.setattr(actor, "Sampler", lambda *_: own)
    monkeypatch.setattr(actor, "dump_stacks_on_signal", lambda _: None)
    return own


def make_engine() -> Engine:
    return Engine(minimal_config(placement={"bind_cores": False}), (), on_gpu=False)


def test_groups_are_queued_in_one_go_and_had_one_by_one_as_they_end(sampler: FakeSampler) -> None:
    async def use() -> None:
        engine = make_engine()
        last = asyncio.ensure_future(engine.samples("a", 2))  # asked for before it is queued
        await engine.generate("a", REQUESTS)
        assert sampler.calls == [[0, 1, 2]]
        sampler.groups[2].set_result("the last")
        assert await last == "the last"
        first = asyncio.ensure_future(engine.samples("a", 0))
        sampler.groups[0].set_result("the first")
        assert await first == "the first"
        sampler.groups[1].set_exception(RuntimeError("out of blocks"))
        with pytest.raises(RuntimeError, match="out of blocks"):
            await engine.samples("a", 1)

    asyncio.run(use())


def test_groups_that_could_not_be_queued_raise_why(sampler: FakeSampler) -> None:
    async def use() -> None:
        engine = make_engine()
        sampler.failure = RuntimeError("CUDA error")
        await engine.generate("a", REQUESTS)
        for index in range(3):
            with pytest.raises(RuntimeError, match="CUDA error"):
                await engine.samples("a", index)

    asyncio.run(use())
