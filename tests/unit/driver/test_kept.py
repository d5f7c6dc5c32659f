from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from hpc_grpo.driver import kept
from hpc_grpo.driver.actors import KeptEngines, reserved
from hpc_grpo.run.contract import KEEPS_ENGINES_VARIABLE
from tests.support.configs import minimal_config
from tests.support.ray_futures import FakeRay, answered

NODE, OTHER = "10.0.0.1", "10.0.0.2"
GONE = "died after it was listed"


class LeftByDriver(FakeRay):
    """A Ray with the engines of a driver that is gone: by name, what each answers to the next driver."""

    def __init__(self, answers: dict[str, Any]) -> None:
        super().__init__()
        self.answers = answers
        self.killed: list[str] = []

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


@pytest.fixture
def after_a_driver(monkeypatch: pytest.MonkeyPatch, fake_ray: FakeRay) -> Any:
    def leave(answers: dict[str, Any], keeps: bool = True) -> LeftByDriver:
        left = LeftByDriver(answers)
        monkeypatch.setattr(kept, "ray", left)
        monkeypatch.setattr(kept, "list_named_actors", left.names)
        monkeypatch.setattr(kept, "_ANSWER_S", 0.01)
        if keeps:
            monkeypatch.setenv(KEEPS_ENGINES_VARIABLE, "1")
        else:
            monkeypatch.delenv(KEEPS_ENGINES_VARIABLE, raising=False)
        return left

    return leave


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
    engines = KeptEngines(minimal_config())
    assert left.killed == list(left.answers)[1:-1]
    assert (engines.take(OTHER, 0), engines.take(NODE, 1)) == (None, None)
    assert engines.take(NODE, 0).name == f"engine {NODE} 0 a1"
    assert engines.take(NODE, 0) is None  # its replacement is another


def test_an_engine_is_detached_under_a_name_of_its_place_and_no_two_have_one(after_a_driver: Any) -> None:
    after_a_driver({})
    engines = KeptEngines(minimal_config())
    first, second = (engines.options(NODE, 1) for _ in range(2))
    assert first["lifetime"] == "detached"
    assert first["name"].startswith(f"engine {NODE} 1 ")
    assert first["name"] != second["name"]


def test_an_eval_apart_from_training_neither_takes_engines_nor_leaves_any(after_a_driver: Any) -> None:
    """They have the weights of one model's folder, and the model after it has its engines in the same places."""
    left = after_a_driver({f"engine {NODE} 0 a1": None})
    engines = KeptEngines(minimal_config(), trains=False)
    assert (len(engines), left.killed, engines.options(NODE, 0)) == (0, [], {})


@pytest.mark.parametrize("is_shared", [True, False])
def test_where_no_driver_follows_or_gpus_are_shared_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, after_a_driver: Any, is_shared: bool
) -> None:
    left = after_a_driver({f"engine {NODE} 0 a1": None}, keeps=is_shared)
    config = minimal_config(placement={"colocate": True}) if is_shared else minimal_config()
    engines = KeptEngines(config)
    assert (len(engines), left.killed, engines.options(NODE, 0)) == (0, [], {})
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(kept, "placement_group", lambda _bundles, **options: asked.append(options))
    reserved(config, NODE, [{"CPU": 1.0}])
    assert asked == [{"strategy": "STRICT_PACK"}]


def test_the_reservation_of_the_driver_before_is_taken_and_the_first_one_is_detached(
    monkeypatch: pytest.MonkeyPatch, after_a_driver: Any
) -> None:
    after_a_driver({})
    groups: dict[str, dict[str, Any]] = {}

    def find(name: str) -> Any:
        if name not in groups:
            raise ValueError("Failed to look up placement group")
        return name

    monkeypatch.setattr(kept, "get_placement_group", find)
    monkeypatch.setattr(kept, "placement_group", lambda _bundles, **options: groups.update({options["name"]: options}))
    reserved(minimal_config(), NODE, [{"CPU": 1.0}])
    assert groups[f"node {NODE}"]["lifetime"] == "detached"
    assert reserved(minimal_config(), NODE, [{"CPU": 1.0}]) == f"node {NODE}"
    assert len(groups) == 1
