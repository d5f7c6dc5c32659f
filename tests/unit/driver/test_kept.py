from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from ray.exceptions import ActorDiedError

from hpc_grpo.config import Config
from hpc_grpo.config.resources import NodeDemand
from hpc_grpo.driver import actors
from hpc_grpo.driver.actors import NodeSlots, Workers, kept_engines, reserve_nodes
from hpc_grpo.driver.inputs import Inputs
from hpc_grpo.engine.actor import Engine
from hpc_grpo.run.contract import KEEPS_ENGINES_VARIABLE
from tests.support.configs import minimal_config
from tests.support.ray_futures import FakeRay, answered

CONFIG = minimal_config(model={"device": "cpu"}, engine={"engines_per_node": 1})
NODE, OTHER = "10.0.0.1", "10.0.0.2"
GONE = "died after it was listed"


class LeftByDriver(FakeRay):
    """A Ray with the engines of a driver that is gone: by name, what each answers to the next driver."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__()
        self.answers = answers
        self.killed: list[str] = []
        self.made: list[dict[str, Any]] = []

    def names(self) -> list[str]:
        return [*self.answers, "grader of somebody else"]

    def get_actor(self, name: str) -> Any:
        answer = self.answers[name]
        if answer is GONE:
            raise ValueError(f"Failed to look up actor with name '{name}'")
        return SimpleNamespace(
            name=name,
            serve_next=SimpleNamespace(
                remote=lambda _config: answer if isinstance(answer, Future) else answered(answer)
            ),
        )

    def kill(self, engine: Any) -> None:
        self.killed.append(engine.name)

    def nodes(self) -> list[dict[str, Any]]:
        resources = {"CPU": 8.0, "node:__internal_head__": 1.0}
        node = {"NodeManagerAddress": NODE, "NodeManagerHostname": "n1", "Alive": True, "Resources": resources}
        return [node]

    def put(self, value: Any) -> Any:
        return value

    def remote(self, kind: Any = None, **_: Any) -> Any:
        """Note the options of engines in `made`."""
        if kind is None:
            return self.remote

        def options(**given: Any) -> Any:
            if kind is Engine:
                self.made.append(given)
            return SimpleNamespace(remote=lambda *_args, **_options: SimpleNamespace(name=given.get("name")))

        return SimpleNamespace(options=options)


@pytest.fixture
def after_a_driver(monkeypatch: pytest.MonkeyPatch, fake_ray: FakeRay) -> Any:
    def leave(answers: dict[str, Any], keeps: bool = True) -> LeftByDriver:
        left = LeftByDriver(answers)
        monkeypatch.setattr(actors, "ray", left)
        monkeypatch.setattr(actors, "list_named_actors", left.names)
        monkeypatch.setattr(actors, "_ANSWER_S", 0.01)
        if keeps:
            monkeypatch.setenv(KEEPS_ENGINES_VARIABLE, "1")
        else:
            monkeypatch.delenv(KEEPS_ENGINES_VARIABLE, raising=False)
        return left

    return leave


def granted(asked: dict[str, Any]) -> Any:
    """A reservation that Ray has granted."""
    return SimpleNamespace(asked=asked, ready=lambda: answered(None))


def started(config: Config, num_learners: int = 1) -> Workers:
    cpu = {"CPU": 1.0}
    slots = NodeSlots(NODE, Mock(), NodeDemand((cpu,) * num_learners, (cpu,)))
    return Workers(config, [slots], Inputs(SimpleNamespace(decode=str), (), {}), 1)


def test_engines_that_answer_are_taken_by_their_place_and_the_others_end(after_a_driver: Any) -> None:
    left = after_a_driver(
        {
            f"engine {NODE} 0 a1": None,
            f"engine {NODE} 1 b2": ValueError("this engine was started with another config"),
            f"engine {OTHER} 0 c3": Future(),
            f"engine {OTHER} 1 d4": ActorDiedError(),
            f"engine {NODE} 0 e5": None,
            f"engine {OTHER} 2 f6": GONE,
        }
    )
    assert {place: engine.name for place, engine in kept_engines(CONFIG).items()} == {
        f"engine {NODE} 0": f"engine {NODE} 0 a1"
    }
    assert left.killed == list(left.answers)[1:-1]


def test_a_kept_engine_works_in_its_place(after_a_driver: Any) -> None:
    left = after_a_driver({f"engine {NODE} 0 a1": None})
    started(CONFIG).stop()
    assert (left.made, left.killed) == ([], [f"engine {NODE} 0 a1", None])  # and the grader


def test_an_engine_is_detached_under_a_name_of_its_place_and_no_two_have_one(after_a_driver: Any) -> None:
    left = after_a_driver({})
    for _ in range(2):
        started(CONFIG)
    first, second = left.made
    assert first["lifetime"] == second["lifetime"] == "detached"
    assert first["name"].startswith(f"engine {NODE} 0 ")
    assert first["name"] != second["name"]


@pytest.mark.parametrize("why", ["an eval holds one model's weights", "no driver follows", "GPUs are shared"])
def test_where_engines_cannot_serve_the_next_driver_none_is_taken_or_left(after_a_driver: Any, why: str) -> None:
    left = after_a_driver({f"engine {NODE} 0 a1": None}, keeps=why != "no driver follows")
    config = minimal_config(placement={"colocate": True}) if why == "GPUs are shared" else CONFIG
    started(config, num_learners=0 if why.startswith("an eval") else 1)
    assert left.killed == []
    assert [set(each) & {"name", "lifetime"} for each in left.made] == [set()]


@pytest.mark.parametrize("is_shared", [True, False])
def test_where_nothing_is_kept_a_reservation_ends_with_its_driver(
    monkeypatch: pytest.MonkeyPatch, after_a_driver: Any, is_shared: bool
) -> None:
    after_a_driver({}, keeps=is_shared)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        actors, "placement_group", lambda _bundles, **options: asked.append(options) or granted(options)
    )
    reserve_nodes(minimal_config(placement={"colocate": True}) if is_shared else CONFIG)
    assert asked == [{"strategy": "STRICT_PACK"}]


def test_the_reservation_of_the_driver_before_is_taken_and_the_first_one_is_detached(
    monkeypatch: pytest.MonkeyPatch, after_a_driver: Any
) -> None:
    after_a_driver({})
    groups: dict[str, Any] = {}

    def find(name: str) -> Any:
        if name not in groups:
            raise ValueError("Failed to look up placement group")
        return groups[name]

    monkeypatch.setattr(actors, "get_placement_group", find)
    monkeypatch.setattr(
        actors, "placement_group", lambda _bundles, **options: groups.setdefault(options["name"], granted(options))
    )
    (first,), (second,) = (reserve_nodes(CONFIG) for _ in range(2))
    assert groups == {f"node {NODE}": first.group}
    assert groups[f"node {NODE}"].asked["lifetime"] == "detached"
    assert second.group is first.group
