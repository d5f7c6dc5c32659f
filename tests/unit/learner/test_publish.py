"""A publisher and two workers in processes of their own, over Gloo and shared files: what one node has."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_grpo.errors import WeightSyncError
from hpc_grpo.learner.publish import WeightPublisher
from hpc_grpo.types import ParameterSpec
from hpc_grpo.weights.node_group import GroupMembership, NodeGroup
from hpc_grpo.weights.store import StoreSpec, WeightStore, bucket_layout

SIZE = 3
DEADLINE_S = 60.0
KEY = 99
LAYOUT = bucket_layout([ParameterSpec("a", (50,), "float32"), ParameterSpec("b", (7, 3), "bfloat16")], bucket_bytes=128)
VERSIONS = (0, 2, 4)
REFUSED, FATAL, REBUILT = 6, 8, 10
"""Versions, by twos as with two minibatches.

Rank 1 cannot load REFUSED, rank 2 dies of FATAL, REBUILT goes to the others in a new group.
"""


def parameters(version: int) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.shape, float(version + 1)) for spec in LAYOUT.specs}


class Publisher:
    """Publishes each version of the scenario, and notes what came of it."""

    def __init__(self, folder: Path, size: int = SIZE) -> None:
        self.version = 0
        store = WeightStore(folder, StoreSpec(LAYOUT, KEY), create=True)
        self.publisher = WeightPublisher(LAYOUT, self.gather, store)
        self.publisher.group = NodeGroup(GroupMembership(folder, 0, size, DEADLINE_S))
        self.folder = folder
        self.store = store

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        full = parameters(self.version)
        yield {name: full[name] for name in names}

    def publish(self, version: int) -> None:
        self.version = version
        self.publisher.stage(version)
        self.publisher.announce()

    def outcome(self, version: int) -> tuple[str, int, float]:
        """The error's words ("" without one), the version the store then calls current, and the time it took."""
        begun = time.monotonic()
        error = ""
        try:
            self.publish(version)
        except WeightSyncError as caught:
            error = str(caught)
        return error, self.store.current().version, time.monotonic() - begun

    def run(self) -> dict[int, tuple[str, int, float]]:
        outcomes = {version: self.outcome(version) for version in (*VERSIONS, REFUSED, FATAL)}
        self.publisher.group = NodeGroup(GroupMembership(self.folder, 0, SIZE - 1, DEADLINE_S, generation=1))
        outcomes[REBUILT] = self.outcome(REBUILT)
        return outcomes


def work(folder: Path, rank: int) -> dict[int, list[float]]:
    """What WeightReceiver does, without vLLM: the values loaded of each version."""
    group = NodeGroup(GroupMembership(folder, rank, SIZE, DEADLINE_S))
    store = WeightStore(folder, StoreSpec(LAYOUT, KEY), create=False)
    loaded = {}
    for version in (*VERSIONS, REFUSED, FATAL, REBUILT):
        if version == FATAL and rank == 2:
            os._exit(9)
        if version == FATAL:
            with suppress(WeightSyncError):
                group.receive_announcement(len(LAYOUT.blocks))
                group.acknowledge(version)
            group = NodeGroup(GroupMembership(folder, rank, SIZE - 1, DEADLINE_S, generation=1))
            continue
        stored = group.receive_announcement(len(LAYOUT.blocks))
        assert stored.version == version
        store.verify(stored)
        if version == REFUSED and rank == 1:
            group.acknowledge(-1)
            continue
        views = [view for bucket in LAYOUT.buckets for _, view in store.tensors(bucket)]
        loaded[version] = sorted({float(value) for view in views for value in view.float().unique()})
        group.acknowledge(version)
    return loaded


def member(folder: Path, rank: int, results: Any) -> None:
    try:
        results.put((rank, Publisher(folder).run() if rank == 0 else work(folder, rank)))
    except Exception as error:  # noqa: BLE001 - carried to the test that started this process
        results.put((rank, error))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    folder = tmp_path_factory.mktemp("shm")
    # The publisher creates the store that the others open, which the driver's order of calls sees to in a run.
    WeightStore(folder, StoreSpec(LAYOUT, KEY), create=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hpc_grpo.learner.publish"])  # torch is imported once, not three times
    queue = context.Queue()
    members = [context.Process(target=member, args=(folder, rank, queue)) for rank in range(SIZE)]
    for process in members:
        process.start()
    try:
        answers = dict(queue.get(timeout=2 * DEADLINE_S) for _ in range(SIZE - 1))
    finally:
        for process in members:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return answers


def test_every_worker_holds_what_was_published(results: dict[int, Any]) -> None:
    for version in VERSIONS:
        assert results[0][version][:2] == ("", version)
        assert results[1][version] == [version + 1.0]


def test_worker_that_fails_makes_the_publish_fail_and_the_version_not_current(results: dict[int, Any]) -> None:
    error, current, _ = results[0][REFUSED]
    assert error == f"engine workers [1] did not load weight version {REFUSED}"
    assert current == VERSIONS[-1]


def test_dead_worker_is_an_error_within_the_deadline(results: dict[int, Any]) -> None:
    error, current, seconds = results[0][FATAL]
    assert "the node's weight group broke at rank 0" in error
    assert current == VERSIONS[-1]
    assert seconds < DEADLINE_S


def test_group_is_rebuilt_without_the_dead_one(results: dict[int, Any]) -> None:
    assert results[0][REBUILT][:2] == ("", REBUILT)
    assert results[1][REBUILT] == [REBUILT + 1.0]


def test_group_that_a_member_never_joins_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    """One of the kind that is not the waiting member's own failure."""
    with pytest.raises(WeightSyncError, match="did not form at rank 1"):
        NodeGroup(GroupMembership(tmp_path, 1, 2, deadline_s=0.5))


def test_learner_without_a_store_gathers_and_says_nothing(tmp_path: Path) -> None:
    gathered: list[str] = []

    @contextmanager
    def gather(names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        gathered.extend(names)
        yield {}

    publisher = WeightPublisher(LAYOUT, gather, None)
    publisher.stage(0)
    publisher.announce()
    assert gathered == ["a", "b"]
