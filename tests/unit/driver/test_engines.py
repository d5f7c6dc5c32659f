from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from hpc_grpo.driver import engines as remote_engine
from hpc_grpo.driver.engines import RemoteEngine, RemoteGrader
from hpc_grpo.driver.remote import Deadline
from hpc_grpo.errors import EngineLostError, GraderLostError, LaunchError, NodesUnavailableError
from tests.support.ray_futures import FakeRay, answered

ADDRESS = "10.0.0.1"
DEADLINE = Deadline(60.0, "deadlines.start_s")


class FakeCluster:
    """Starts actors, of which the first `num_broken` replacements do not come up, and notes those that are killed."""

    def __init__(self, num_broken: int = 0) -> None:
        self.num_started = 0
        self.killed: list[str] = []
        self.is_alive = True
        self._num_broken = num_broken

    def start(self) -> Any:
        self.num_started += 1
        is_broken = 1 < self.num_started <= self._num_broken + 1
        ready = ValueError("No available memory for the cache blocks.") if is_broken else None
        return SimpleNamespace(name=f"actor {self.num_started}", ready=SimpleNamespace(remote=lambda: answered(ready)))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": self.is_alive, "NodeManagerAddress": ADDRESS}]

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.name)


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch, fake_ray: FakeRay) -> Any:
    def make(cluster: FakeCluster) -> RemoteEngine:
        monkeypatch.setattr(remote_engine, "ray", cluster)
        return RemoteEngine(cluster.start, ADDRESS, DEADLINE)

    return make


def test_an_engine_that_raised_is_killed_before_the_next_one_takes_its_place(
    make_engine: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = FakeCluster()
    engine = make_engine(cluster)
    engine.replace(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB.\nSee the documentation"))
    assert (cluster.killed, engine.actor.name, engine.num_restarts) == (["actor 1"], "actor 2", 1)
    said = "An engine on 10.0.0.1 raised RuntimeError: CUDA out of memory. Tried to allocate 2 GiB.; starting another"
    assert said in capsys.readouterr().out


def test_an_engine_that_does_not_come_up_counts_as_a_restart(make_engine: Any) -> None:
    cluster = FakeCluster(num_broken=5)
    engine = make_engine(cluster)
    words = r"raised ValueError: No available memory for the cache blocks\., after 3 restarts"
    with pytest.raises(EngineLostError, match=words) as caught:
        engine.replace(ActorDiedError())
    assert isinstance(caught.value, LaunchError)
    assert cluster.num_started == 4


def test_the_death_of_an_engine_without_restarts_left_ends_the_run(make_engine: Any) -> None:
    engine = make_engine(FakeCluster())
    for _ in range(3):
        engine.replace(ActorDiedError())
    with pytest.raises(EngineLostError, match=r"An engine on 10\.0\.0\.1 died, after 3 restarts"):
        engine.replace(ActorDiedError())


def test_an_engine_lost_with_its_node_is_no_failure_of_the_engine(make_engine: Any) -> None:
    cluster = FakeCluster()
    engine = make_engine(cluster)
    cluster.is_alive = False
    with pytest.raises(NodesUnavailableError):
        engine.replace(ActorDiedError())


def test_only_restarts_in_a_row_count_for_a_grader(make_engine: Any) -> None:
    cluster = FakeCluster()
    make_engine(cluster)  # the cluster stands in for Ray
    grader = RemoteGrader(cluster.start, ADDRESS, DEADLINE)
    for _ in range(5):
        grader.replace(ActorDiedError())
        grader.note_success()
    for _ in range(3):
        grader.replace(ActorDiedError())
    with pytest.raises(GraderLostError, match=r"A grader on 10\.0\.0\.1 died, after 3 restarts"):
        grader.replace(ActorDiedError())
    assert grader.num_restarts == 8
