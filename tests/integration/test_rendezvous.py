"""The learners' rendezvous store over real Ray calls: torch's contract of a store, and a group that meets in it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from hpc_grpo.learner.group import RendezvousStore
from hpc_grpo.learner.rendezvous import Rendezvous

pytestmark = pytest.mark.integration


def store_of(rendezvous: Any) -> RendezvousStore:
    return RendezvousStore(lambda method, *args: ray.get(getattr(rendezvous, method).remote(*args)))


class Member:
    """One rank, as torch.distributed sees it."""

    def __init__(self, rank: int, size: int, rendezvous: Any) -> None:
        self._store = store_of(rendezvous)
        dist.init_process_group("gloo", store=self._store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        self.rank, self.size = rank, size

    def sums(self) -> list[float]:
        """A sum over all ranks, and one in a group of its own that is made later."""
        later = dist.new_group(list(range(self.size)))
        found = []
        for group in (None, later):
            tensor = torch.tensor([float(self.rank + 1)])
            dist.all_reduce(tensor, group=group)
            found.append(float(tensor))
        return found


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[Any]:
    here = str(Path(__file__).parent)  # workers import Member from this file
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": variables})
    try:
        yield ray.remote(Rendezvous).options(num_cpus=0).remote()
    finally:
        ray.shutdown()


@pytest.fixture
def store(rendezvous: Any, request: pytest.FixtureRequest) -> Iterator[dist.Store]:
    below = store_of(rendezvous)
    yield dist.PrefixStore(request.node.name, below)


def test_values_counters_and_conditions(store: dist.Store) -> None:
    store.set("a", b"1\0\xff")
    assert store.get("a") == b"1\0\xff"
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    assert store.get("n") == b"5"
    assert store.check(["a", "n"])
    assert not store.check(["a", "b"])
    assert store.compare_set("a", "other", "new") == b"1\0\xff"
    assert store.compare_set("b", "", "new") == b"new"
    assert store.get("b") == b"new"
    assert store.delete_key("b")
    assert not store.delete_key("b")


def test_a_value_that_does_not_come_is_an_error(store: dist.Store) -> None:
    with pytest.raises(dist.DistStoreError, match=r"no value of .*absent"):
        store.wait(["absent"], timedelta(seconds=0.2))


def test_additions_of_many_are_all_counted(rendezvous: Any) -> None:
    ray.get([rendezvous.add.remote("many", 1) for _ in range(500)])
    assert ray.get(rendezvous.get.remote(["many"], 1.0)) == [b"500"]


def test_a_group_meets_and_makes_further_groups(rendezvous: Any) -> None:
    members = [ray.remote(Member).options(num_cpus=0).remote(rank, 2, rendezvous) for rank in range(2)]
    assert ray.get([member.sums.remote() for member in members], timeout=60) == [[3.0, 3.0]] * 2
