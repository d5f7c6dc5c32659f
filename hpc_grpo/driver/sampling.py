"""The rollout pool: groups on their way through an engine and a grader, once more where one of them failed.

A group goes to the engine that has fewest to sample, and to its grader as soon as it has ended itself. Where engines
have nothing to do, as at each step of a synchronous run, its engine follows from its position alone, so that a resumed
run forms the same batches.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from ray.exceptions import RayActorError, RayTaskError

from hpc_grpo.driver.engines import RemoteEngine, RemoteGrader, is_engine_failure
from hpc_grpo.driver.remote import ActorLostError, Deadline, all_errors, first_error, get_all, not_done
from hpc_grpo.run.pulse import ASKED_AGAIN, PULSE
from hpc_grpo.types import GroupGrades, GroupRequest, Prompt


@dataclass(frozen=True)
class GradedGroup:
    """A finished group: `samples` refers to its GroupSamples in the object store."""

    prompt: Prompt
    samples: Any
    grades: GroupGrades


@dataclass(eq=False)
class StartedGroup:
    """A group under way: references to its samples and grades, and the actors that they are asked of."""

    prompt: Prompt
    request: GroupRequest
    with_texts: bool
    engine: RemoteEngine
    grader: RemoteGrader
    actor: Any = None
    grading_actor: Any = None
    samples: Any = field(default=None, repr=False)
    grades: Any = field(default=None, repr=False)

    @property
    def is_with_its_engine(self) -> bool:
        return self.actor is self.engine.actor

    @property
    def is_with_its_grader(self) -> bool:
        return self.grading_actor is self.grader.actor

    def grade(self) -> None:
        """Ask its grader for its grades; samples that are there already are not asked for again."""
        self.grading_actor = self.grader.actor
        self.grades = self.grading_actor.grade.remote(self.samples, self.prompt, self.with_texts)

    def grader_failure(self, timeout_s: float | None) -> Exception | None:
        """Return that its grader died before it had graded, or None where it did not within the time."""
        # By the samples, which are fetched here for once: of a failed argument Ray raises the argument's own error.
        error = first_error([self.grades], timeout_s)
        has_died = isinstance(error, RayActorError) and first_error([self.samples], 0.0) is None
        return error if has_died else None

    def engine_failure(self, timeout_s: float | None) -> Exception | None:
        """Return what its engine failed with in the place of samples, or None where it did not within the time."""
        # Only where grading failed: the driver would fetch samples that are there.
        if first_error([self.grades], timeout_s) is None:
            return None
        error = first_error([self.samples], 0.0)
        return error if is_engine_failure(error) else None


class RolloutPool:
    """Sends groups through engines and graders. One that fails is replaced, and what it was asked is asked again."""

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        graders: Sequence[RemoteGrader],
        revive: Callable[[RemoteEngine, Exception], None],
        start_deadline: Deadline,
    ) -> None:
        """`revive` replaces an engine, given its error, by one that holds the published weights."""
        self._engines = engines
        self._graders = graders
        self._revive = revive
        self._start_deadline = start_deadline
        self._under_way: list[StartedGroup] = []

    def start(
        self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]
    ) -> list[StartedGroup]:
        """Queue all groups, each on the engine that has fewest by then: in turn, where all have as many."""
        asked = zip(prompts, requests, with_texts, strict=True)
        engines = [self._engines[index] for index in spread(len(prompts), self._loads())]
        actors = zip(engines, itertools.cycle(self._graders), strict=False)
        groups = [StartedGroup(*of_group, *own) for of_group, own in zip(asked, actors, strict=True)]
        self._under_way += groups
        self._send(groups)
        return groups

    def wait(self, started: Sequence[StartedGroup], waiting_for: str) -> list[GradedGroup]:
        """Wait for all groups' grades. Raises what a grader raised; EngineLostError or GraderLostError after too many
        failures of an engine or a grader.
        """
        while True:
            try:
                grades = get_all([group.grades for group in started], None, waiting_for)
            except (ActorLostError, RayTaskError):
                if not self._recover(started):
                    raise
                PULSE.turn_to(ASKED_AGAIN)
            else:
                for grader in self._graders:
                    grader.note_success()
                taken = set(started)
                self._under_way = [group for group in self._under_way if group not in taken]
                pairs = zip(started, grades, strict=True)
                return [GradedGroup(group.prompt, group.samples, own) for group, own in pairs]

    @property
    def num_engine_restarts(self) -> int:
        return sum(engine.num_restarts for engine in self._engines)

    @property
    def num_grader_restarts(self) -> int:
        return sum(grader.num_restarts for grader in self._graders)

    def forget_prefixes(self) -> None:
        """Empty the engines' prefix caches. One that failed is left to the next wait or publish, which replaces it."""
        forgetting = [engine.actor.forget_prefixes.remote() for engine in self._engines]
        for error in all_errors(forgetting, None):
            if error is not None and not is_engine_failure(error):
                raise error

    def _loads(self) -> list[int]:
        """Count the groups that each engine has not sampled yet, of those that nobody has waited for."""
        unsampled = not_done([group.samples for group in self._under_way])
        counts = Counter(id(group.engine) for group in self._under_way if group.samples in unsampled)
        return [counts[id(engine)] for engine in self._engines]

    def _send(self, groups: Sequence[StartedGroup]) -> None:
        """Queue each engine's share in one call, so that the order it runs in is fixed."""
        shares = defaultdict[int, list[StartedGroup]](list)
        for group in groups:
            shares[id(group.engine)].append(group)
        for share in shares.values():
            call, actor = uuid4().hex, share[0].engine.actor
            actor.generate.remote(call, [group.request for group in share])
            for index, group in enumerate(share):
                group.actor, group.samples = actor, actor.samples.remote(call, index)
                group.grade()

    def _recover(self, started: Sequence[StartedGroup]) -> bool:
        """Replace what failed and ask again for what was lost with it. Return False where nothing was to replace."""
        for engine in self._engines:
            asked = [group for group in started if group.engine is engine and group.is_with_its_engine]
            if error := next(filter(None, (group.engine_failure(0.0) for group in asked)), None):
                self._revive(engine, error)
        for grader in self._graders:
            asked = [group for group in started if group.grader is grader and group.is_with_its_grader]
            if error := next(filter(None, (group.grader_failure(0.0) for group in asked)), None):
                grader.replace(self._start_deadline, error)
        unsampled = [group for group in started if not group.is_with_its_engine and group.engine_failure(None)]
        ungraded = [group for group in started if not group.is_with_its_grader and group.grader_failure(None)]
        self._send(unsampled)
        for group in ungraded:
            group.grade()
        return bool(unsampled or ungraded)


def spread(count: int, loads: Sequence[int]) -> list[int]:
    """Return the index of the engine for each of `count` groups: the one that has fewest by then, the first of several.

    >>> spread(4, [0, 0, 0]), spread(4, [3, 0, 1])
    ([0, 1, 2, 0], [1, 1, 2, 1])
    """
    fewest = [(load, index) for index, load in enumerate(loads)]
    heapq.heapify(fewest)
    chosen = []
    for _ in range(count):
        load, index = fewest[0]
        heapq.heapreplace(fewest, (load + 1, index))
        chosen.append(index)
    return chosen
