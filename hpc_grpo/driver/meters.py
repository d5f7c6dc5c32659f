"""Ask every process of the run, once a step, what it has used. Runs in the driver, and waits for none of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from hpc_grpo.driver.weights import NodeMembers
from hpc_grpo.metrics.usage import Reading, usage_metrics
from hpc_grpo.system.usage import METER

_PATIENCE_S = 0.2
"""They answer in a millisecond; one that does not is left out of the step."""

_Process = tuple[str, int, str]
"""Its kind, its number among those of its kind, and its node."""


class Meters:
    """What all processes used from one step to the next."""

    def __init__(self, nodes: Mapping[str, NodeMembers]) -> None:
        """Read the members of nodes, by the nodes' names."""
        self._nodes = nodes
        self._asked: dict[_Process, Any] = {}

    def ask(self) -> None:
        """Ask all of them, who answer while the driver does other things.

        One that still owes an answer is not asked anew: the late one counts in a later step, and nothing is lost of a
        node that is slow.
        """
        for process, actor in self._actors():
            if process not in self._asked:
                self._asked[process] = actor.usage.remote()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of those that have answered; one that died is others' to find and replace."""
        readings = [Reading("driver", 0, next(iter(self._nodes)), METER.read())]
        for (kind, index, node), usage in self._answers():
            own = usage
            if kind == "grader":
                own, workers = usage
                numbered = enumerate(workers, start=index * len(workers))
                readings += [Reading("reward_worker", number, node, each) for number, each in numbered if each]
            readings.append(Reading(kind, index, node, own))
        return usage_metrics(readings)

    def _actors(self) -> Iterator[tuple[_Process, Any]]:
        learners, engines = itertools.count(), itertools.count()
        for number, (node, members) in enumerate(self._nodes.items()):
            yield from ((("learner", next(learners), node), learner) for learner in members.learners)
            yield from ((("engine", next(engines), node), engine.actor) for engine in members.engines)
            if members.grader is not None:
                yield ("grader", number, node), members.grader.actor

    def _answers(self) -> Iterator[tuple[_Process, Any]]:
        if not self._asked:
            return
        asked = list(self._asked.values())
        answered = set(ray.wait(asked, num_returns=len(asked), timeout=_PATIENCE_S)[0])
        for process, call in list(self._asked.items()):
            if call in answered:
                del self._asked[process]
                with suppress(RayError):
                    yield process, ray.get(call)
