from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hpc_grpo.metrics.usage import Reading, node_seconds, slow_node, usage_metrics
from hpc_grpo.system.usage import Usage
from hpc_grpo.types import GIB


def reading(kind: str, index: int, node: str = "n1", busy_s: float = 0.0, **of_gpus: Any) -> Reading:
    return Reading(kind, index, node, Usage(4.0, 6.0, 2 * GIB, busy_s, **of_gpus))


def step(**seconds: float) -> dict[str, float]:
    """A step of nodes with an engine each, busy for so long."""
    return usage_metrics([reading("engine", n, node, s) for n, (node, s) in enumerate(seconds.items())])


def test_every_process_has_its_cores_and_its_memory() -> None:
    metrics = usage_metrics([reading("driver", 0), reading("learner", 1, gpu_memory=5 * GIB, gpu_utilization=0.5)])
    assert {name: value for name, value in metrics.items() if name.startswith("process/")} == {
        "process/cpu_cores/driver-0": 1.5,
        "process/memory_gib/driver-0": 2.0,
        "process/cpu_cores/learner-1": 1.5,
        "process/memory_gib/learner-1": 2.0,
        "process/gpu_memory_gib/learner-1": 5.0,
        "process/gpu_utilization/learner-1": 0.5,
    }


def test_a_line_of_a_large_run_is_no_longer_than_one_of_a_small_run() -> None:
    readings = [reading("engine", n, f"n{n}", float(n), gpu_utilization=n % 2) for n in range(1000)]
    metrics = usage_metrics(readings)
    assert metrics["process/cpu_cores/engines"] == 1500.0
    assert metrics["process/memory_gib/engines"] == 2.0
    assert metrics["process/gpu_utilization/engines"] == 0.5
    assert len(metrics) < 40
    assert set(node_seconds(metrics)) == {f"n{n}" for n in range(968, 1000)}, "the slowest are named"


def test_a_node_takes_as_long_as_its_slowest_engine_and_its_slowest_learner() -> None:
    readings = [reading("engine", 0, busy_s=3.0), reading("engine", 1, busy_s=5.0), reading("learner", 0, busy_s=2.0)]
    metrics = usage_metrics([*readings, reading("grader", 0, busy_s=9.0)])
    assert node_seconds(metrics) == {"n1": {"sample": 5.0, "train": 2.0}}
    assert metrics["node/median_s"] == 7.0


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([step(a=1.0, b=1.5)] * 5, "node b takes 1.50 times as long as the others do"),
        (
            [step(a=1.0, b=2.0, c=1.0)] * 4 + [step(a=9.0, b=2.0, c=1.0)],
            "node a takes 2.17 times as long as the others do",
        ),
        ([step(a=1.3, b=1.0)] * 5, "node a takes 1.30 times as long as the others do"),
        ([step(a=1.1, b=1.0)] * 5, ""),
        ([step(a=1.0, b=2.0)] * 4, ""),
        ([step(a=1.0)] * 9, ""),
        ([step(a=0.0, b=0.0)] * 9, ""),
        ([{"time/train_s": 3.0}] * 9, ""),
    ],
    ids=[
        "two nodes",
        "of all steps",
        "notable",
        "not notable",
        "too few steps",
        "one node",
        "nothing was done",
        "nothing on record",
    ],
)
def test_the_slowest_node_of_all_steps_is_named_where_others_would_see_it(
    steps: Sequence[dict[str, float]], expected: str
) -> None:
    assert slow_node(steps) == expected
