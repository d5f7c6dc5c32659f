"""What the driver asks of every process, with futures in the place of Ray's references."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from hpc_grpo.driver import telemetry
from hpc_grpo.driver.telemetry import Meters
from hpc_grpo.driver.weights import NodeMembers
from hpc_grpo.metrics.usage import node_seconds
from hpc_grpo.system.usage import Usage
from tests.support.ray_futures import FakeRay, answered

USAGE = Usage(wall_s=2.0, cpu_s=3.0, memory=1 << 30, busy_s=1.0)


def actor(answer: Any) -> Any:
    reference = answer if isinstance(answer, Future) else answered(answer)
    return SimpleNamespace(usage=SimpleNamespace(remote=lambda: reference))


def remote(answer: Any) -> Any:
    return SimpleNamespace(actor=actor(answer))


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "ray", FakeRay())
    monkeypatch.setattr(telemetry, "_PATIENCE_S", 0.01)


def cores(metrics: dict[str, float]) -> set[str]:
    return {name.rpartition("/")[2] for name in metrics if name.startswith("process/cpu_cores/")}


def test_processes_are_counted_over_all_nodes() -> None:
    graded: Any = (USAGE, [USAGE, None])
    nodes = {name: NodeMembers([actor(USAGE)], [remote(USAGE), remote(USAGE)], remote(graded)) for name in ("n1", "n2")}
    asked = Meters(nodes)
    asked.ask()
    metrics = asked.metrics()
    expected = {"driver-0", "learner-0", "learner-1", *(f"engine-{n}" for n in range(4)), "grader-0", "grader-1"}
    assert cores(metrics) == expected | {"reward_worker-0", "reward_worker-2"}
    assert node_seconds(metrics) == {name: {"train": 1.0, "sample": 1.0} for name in ("n1", "n2")}


def test_those_that_died_or_do_not_answer_are_left_out_and_others_find_them() -> None:
    silent: Future[Usage] = Future()
    nodes = {"n1": NodeMembers([actor(USAGE)], [remote(ActorDiedError()), remote(silent)])}
    asked = Meters(nodes)
    asked.ask()
    assert cores(asked.metrics()) == {"driver-0", "learner-0"}
    assert cores(asked.metrics()) == {"driver-0"}, "what was not asked anew is no news"


def test_an_answer_that_came_late_counts_in_a_later_step_and_nothing_of_a_slow_node_is_lost() -> None:
    late: Future[Usage] = Future()
    answers = iter([late, answered(USAGE)])
    slow: Any = SimpleNamespace(actor=SimpleNamespace(usage=SimpleNamespace(remote=lambda: next(answers))))
    asked = Meters({"n1": NodeMembers([], [slow])})
    asked.ask()
    assert node_seconds(asked.metrics()) == {}
    asked.ask()
    late.set_result(replace(USAGE, busy_s=7.0))
    assert node_seconds(asked.metrics()) == {"n1": {"sample": 7.0}}
    asked.ask()
    assert node_seconds(asked.metrics()) == {"n1": {"sample": 1.0}}
