"""The rollout pool: groups on their way through an engine and a grader, once more where the engine failed.

Which engine and grader a group meets follows from its position alone, so that a resumed run forms the same batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayTaskError

from hpc_grpo.driver.engines import RemoteEngine, is_engine_failure
from hpc_grpo.driver.remote import ActorLostError, all_errors, first_error, get_all
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt


@dataclass(frozen=True)
class GradedGroup:
    """A finished group: `samples` refers to its GroupSamples in the object store."""

    prompt: Prompt
    samples: Any
    grades: GroupGrades


@dataclass
class StartedGroup:
    """A group under way: references to its samples and grades, and the actor that they are asked of."""

    prompt: Prompt
    request: GroupRequest
    with_texts: bool
    engine: RemoteEngine
    grader: Any
    actor: Any = None
    samples: Any = field(default=None, repr=False)
    grades: Any = field(default=None, repr=False)

    @property
    def is_with_its_engine(self) -> bool:
        return self.actor is self.engine.actor

    def engine_failure(self, timeout_s: float | None) -> Exception | None:
        """Return what its engine failed with in the place of samples, or None where it did not within the time."""
        # Only where grading failed: the driver would fetch samples that are there.
        if first_error([self.grades], timeout_s) is None:
            return None
        error = first_error([self.samples], 0.0)
        return error if is_engine_failure(error) else None


class RolloutPool:
    """Sends groups through the engines. One that fails is replaced, and what it was asked is asked again."""

    def __init__(
        self, engines: Sequence[RemoteEngine], graders: Sequence[Any], revive: Callable[[RemoteEngine, Exception], None]
    ) -> None:
        """`revive` replaces an engine, given its error, by one that holds the published weights."""
        self._engines = engines
        self._graders = graders
        self._revive = revive

    def start(
        self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]
    ) -> list[StartedGroup]:
        """Queue all groups, neighbours on different engines."""
        asked = zip(prompts, requests, with_texts, strict=True)
        actors = zip(itertools.cycle(self._engines), itertools.cycle(self._graders), strict=True)
        groups = [StartedGroup(*of_group, *own) for of_group, own in zip(asked, actors, strict=False)]
        self._send(groups)
        return groups

    def wait(self, started: Sequence[StartedGroup], waiting_for: str) -> list[GradedGroup]:
        """Wait for all groups' grades. Raises what a grader raised, EngineLostError when an engine fails too often."""
        while True:
            try:
                grades = get_all([group.grades for group in started], None, waiting_for)
            except (ActorLostError, RayTaskError):
                if not self._recover(started):
                    raise
            else:
                pairs = zip(started, grades, strict=True)
                return [GradedGroup(group.prompt, group.samples, own) for group, own in pairs]

    @property
    def num_engine_restarts(self) -> int:
        return sum(engine.num_restarts for engine in self._engines)

    def forget_prefixes(self) -> None:
        """Empty the engines' prefix caches. One that failed is left to the next wait or publish, which replaces it."""
        forgetting = [engine.actor.forget_prefixes.remote() for engine in self._engines]
        for error in all_errors(forgetting, None):
            if error is not None and not is_engine_failure(error):
                raise error

    def _send(self, groups: Sequence[StartedGroup]) -> None:
        """Send each engine's share in one call, so that the order it runs in is fixed."""
        for engine in self._engines:
            share = [group for group in groups if group.engine is engine]
            if not share:
                continue
            requests = [group.request for group in share]
            results = engine.actor.generate.options(num_returns=len(share)).remote(requests)
            references = results if isinstance(results, list) else [results]
            for group, samples in zip(share, references, strict=True):
                group.actor, group.samples = engine.actor, samples
                group.grades = group.grader.grade.remote(samples, group.prompt, group.with_texts)

    def _recover(self, started: Sequence[StartedGroup]) -> bool:
        """Revive the engines that failed and ask again for what was lost with them. Return False where none failed."""
        for engine in self._engines:
            asked = [group for group in started if group.engine is engine and group.is_with_its_engine]
            if error := next(filter(None, (group.engine_failure(0.0) for group in asked)), None):
                self._revive(engine, error)
        lost = [group for group in started if not group.is_with_its_engine and group.engine_failure(None)]
        self._send(lost)
        return bool(lost)
