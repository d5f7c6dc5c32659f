"""Measurements of the run's processes: resource usage at each step, and profiles of some steps.

Skips an actor that died; other code replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import ray
from ray.exceptions import RayError

from hpc_grpo.driver.weights import NodeMembers
from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.profiling import StackProfile
from hpc_grpo.metrics.usage import Reading, usage_metrics
from hpc_grpo.run.files import when_there_is_space, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.usage import METER

_PATIENCE_S = 0.2
"""Processes usually answer in a millisecond. A process that needs longer than this is skipped in the step."""


class Meters:
    """Measures what all processes used from one step to the next. Waits for slow processes at most 0.2 s a step."""

    def __init__(self, nodes: Mapping[str, NodeMembers]) -> None:
        """`nodes` maps each node's name to its actors."""
        self._nodes = nodes
        self._pending: dict[tuple[str, int, str], Any] = {}
        """The call of each asked process, by its kind, its number within the kind, and its node."""

    def ask(self) -> None:
        """Ask all processes for their usage, except those that have not answered yet: their answer counts later."""
        counts: dict[str, int] = {}
        for node, members in self._nodes.items():
            engines = [("engine", engine.actor) for engine in members.engines]
            graders = [("grader", members.grader.actor)] if members.grader else []
            for kind, actor in [*(("learner", learner) for learner in members.learners), *engines, *graders]:
                number = counts.get(kind, 0)
                counts[kind] = number + 1
                if (kind, number, node) not in self._pending:
                    self._pending[kind, number, node] = actor.usage.remote()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the driver, and of the processes that have answered."""
        calls = list(self._pending.values())
        done = set(ray.wait(calls, num_returns=len(calls), timeout=_PATIENCE_S)[0]) if calls else set()
        answers = {process: call for process, call in self._pending.items() if call in done}
        self._pending = {process: call for process, call in self._pending.items() if call not in done}
        readings = [Reading("driver", 0, next(iter(self._nodes)), METER.read())]
        for (kind, index, node), usage in _values(answers).items():
            own, workers = usage if kind == "grader" else (usage, [])
            numbered = enumerate(workers, start=index * len(workers))
            readings += [Reading("reward_worker", number, node, each) for number, each in numbered if each]
            readings.append(Reading(kind, index, node, own))
        return usage_metrics(readings)


class Profiles:
    """Profiles the driver, the first learner and the first engine over the steps of `metrics.profile_steps`.

    Writes the profiles after the last of these steps, or when the loop ends.
    """

    def __init__(self, run_dir: RunDir, steps: tuple[int, int], learner: Any, engine: Any = None) -> None:
        """`learner` is an actor, `engine` a RemoteEngine; SFT has none. Raises ConfigError without pyinstrument."""
        if find_spec("pyinstrument") is None:
            raise ConfigError(
                "metrics.profile_steps needs pyinstrument, which is not installed. Install hpc-grpo[train] again, or "
                "set metrics.profile_steps=null."
            )
        self._run_dir, self._steps = run_dir, steps
        self._learner, self._engine = learner, engine
        self._own: StackProfile | None = None
        self._profiled: dict[str, Any] = {}

    def before(self, step: int) -> None:
        """Start profiling if `step` is in the range, also in an attempt that resumes inside it."""
        first, last = self._steps
        if self._own is not None or not first <= step <= last:
            return
        actors = {"learner-0": self._learner} | ({"engine-0": self._engine.actor} if self._engine else {})
        started = _values({name: actor.start_profile.remote() for name, actor in actors.items()}, says="be profiled")
        self._profiled = {name: actors[name] for name in started}
        self._own = StackProfile()

    def after(self, step: int) -> None:
        if step >= self._steps[1]:
            self.close()

    def close(self) -> None:
        """Stop the profiles that run, and write them."""
        if self._own is None:
            return
        files = {"driver-0.stacks.html": self._own.stop()}
        self._own = None
        stopping = {name: actor.stop_profile.remote() for name, actor in self._profiled.items()}
        for name, found in _values(stopping, says="be profiled").items():
            files |= {f"{name}.{suffix}": content for suffix, content in found.items()}
        folder = self._run_dir.profiles(*self._steps)

        def write() -> None:
            for name, content in files.items():
                write_atomic(folder / name, content)

        when_there_is_space(write, "the profiles")
        print(f"Profiles of steps {self._steps[0]} to {self._steps[1]}: {folder}", flush=True)


def _values(calls: Mapping[Any, Any], says: str = "") -> dict[Any, Any]:
    """Return the value of each successful call, by its key.

    For a failure, prints that the actor could not do what `says` names, such as "be profiled"; "" prints nothing.
    """
    values = {}
    for key, call in calls.items():
        try:
            values[key] = ray.get(call)
        except RayError as error:
            if says:
                print(f"{key} could not {says}: {error}", flush=True)
    return values
