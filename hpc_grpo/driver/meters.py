"""Ask every process of the run, once a step, what it has used. Runs in the driver, and waits for none of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from hpc_grpo.driver.weights import NodeMembers
from hpc_grpo.metrics.usage import Reading, usage_metrics
from hpc_grpo.system.usage import METER

_PATIENCE_S = 0.2
"""They answer in a millisecond; one that does not is left out of the step."""


class Meters:
    """What all processes used from one step to the next."""

    def __init__(self, nodes: Mapping[str, NodeMembers]) -> None:
        """Read the members of nodes, by the nodes' names."""
        self._nodes = nodes
        self._asked: list[tuple[Any, str, int, str]] = []

    def ask(self) -> None:
        """Ask all of them, who answer while the driver does other things."""
        learners = engines = 0
        self._asked = []
        for number, (node, members) in enumerate(self._nodes.items()):
            for learner in members.learners:
                self._asked.append((learner.usage.remote(), "learner", learners, node))
                learners += 1
            for engine in members.engines:
                self._asked.append((engine.actor.usage.remote(), "engine", engines, node))
                engines += 1
            if members.grader is not None:
                self._asked.append((members.grader.actor.usage.remote(), "grader", number, node))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of those that have answered; one that died is others' to find and replace."""
        driver = next(iter(self._nodes))
        readings = [Reading("driver", 0, driver, METER.read())]
        if self._asked:
            ray.wait([asked for asked, *_ in self._asked], num_returns=len(self._asked), timeout=_PATIENCE_S)
        for answer, kind, index, node in self._asked:
            usage = _answer(answer)
            if kind == "grader" and usage is not None:
                usage, workers = usage
                first = index * len(workers)
                own = ((first + n, each) for n, each in enumerate(workers) if each is not None)
                readings += [Reading("reward_worker", n, node, each) for n, each in own]
            if usage is not None:
                readings.append(Reading(kind, index, node, usage))
        self._asked = []
        return usage_metrics(readings)


def _answer(asked: Any) -> Any:
    """Return what a process answered; None where it has not yet, or died."""
    if not ray.wait([asked], num_returns=1, timeout=0)[0]:
        return None
    try:
        return ray.get(asked)
    except (RayActorError, RayTaskError):
        return None
