"""The rollout pool: groups on their way through an engine and a grader, once more where one of them failed.

A group goes to the engine that has fewest to sample, and to its grader as soon as it has ended itself. Where engines
have nothing to do, as at each step of a synchronous run, its engine follows from its position alone, so that a resumed
run forms the same batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from hpc_grpo.driver.engines import RemoteEngine, RemoteGrader, is_engine_failure
from hpc_grpo.driver.remote import Deadline, all_errors, death, ended, first_error, get_all
from hpc_grpo.driver.rollouts import GradedGroup, spread
from hpc_grpo.run.pulse import ASKED_AGAIN, PULSE
from hpc_grpo.types import GroupRequest, Prompt


@dataclass(frozen=True)
class Call:
    """A call of an engine or a grader, made of the actor that it had then."""

    of: RemoteEngine | RemoteGrader
    actor: Any
    reference: Any

    @property
    def is_lost(self) -> bool:
        """Whether another actor has taken the place of the one that was called."""
        return self.actor is not self.of.actor


@dataclass(eq=False)
class StartedGroup:
    """A group under way. `state` changes where the driver notes that a call has ended.

    Both calls are made at once: Ray hands the samples to the grader when the engine has them. The reference of
    `sampling` ends together with `samples` and holds nothing, so that the driver never fetches samples.
    """

    prompt: Prompt
    request: GroupRequest
    with_texts: bool
    engine: RemoteEngine
    grader: RemoteGrader
    state: Literal["sampling", "grading", "done", "failed"] = "sampling"
    was_lost: bool = False
    samples: Any = field(init=False, repr=False)
    sampling: Call = field(init=False, repr=False)
    grading: Call = field(init=False, repr=False)
    last: Call = field(init=False, repr=False)
    """The call that a group ended with, which holds its grades or the error that it failed with."""

    @property
    def is_open(self) -> bool:
        return self.state in ("sampling", "grading")

    @property
    def call(self) -> Call:
        """The call that an open group waits for."""
        return self.sampling if self.state == "sampling" else self.grading

    def sample(self, call: str, index: int) -> None:
        """Ask the engine for the samples of a call of `generate`, and the grader for their grades."""
        actor = self.engine.actor
        self.samples, over = actor.samples.remote(call, index)
        self.sampling = Call(self.engine, actor, over)
        self.grade()

    def grade(self) -> None:
        actor = self.grader.actor
        self.grading = Call(self.grader, actor, actor.grade.remote(self.samples, self.prompt, self.with_texts))

    def note_end(self) -> Exception | None:
        """Wait for the call and change the state. Return the error of an engine or a grader that is to be replaced."""
        error = first_error([self.call.reference], None)
        if error and (is_engine_failure(error) if self.state == "sampling" else death(error)):
            return error
        if not error and self.state == "sampling":
            self.state = "grading"
        else:
            self.last, self.state = self.call, "failed" if error else "done"
        return None


class RolloutPool:
    """Sends groups through engines and graders. One that fails is replaced, and asked again for what it owed."""

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
        """Queue all groups, each on the engine that has fewest by then: in turn, where all have as many.

        Groups that a publish lost with their engine are queued first. Raises EngineLostError or GraderLostError after
        too many failures.
        """
        self._follow(0.0)
        asked = zip(prompts, requests, with_texts, strict=True)
        sampling = [group.engine for group in self._under_way if group.state == "sampling"]
        loads = [sum(own is engine for own in sampling) for engine in self._engines]
        engines = [self._engines[index] for index in spread(len(prompts), loads)]
        actors = zip(engines, itertools.cycle(self._graders), strict=False)
        groups = [StartedGroup(*of_group, *own) for of_group, own in zip(asked, actors, strict=True)]
        self._under_way += groups
        self._send(groups)
        return groups

    def wait(self, started: Sequence[StartedGroup], waiting_for: str) -> list[GradedGroup]:
        """Wait for the grades of all groups. Meanwhile follow the other groups under way too.

        Raises what a grader raised; EngineLostError or GraderLostError after too many failures.
        """
        while any(group.is_open for group in started) and all(group.state != "failed" for group in started):
            if any(group.was_lost for group in self._under_way):
                PULSE.turn_to(ASKED_AGAIN)
            self._follow(None)
        over = [group for group in started if not group.is_open]  # all, or one failed and its error is raised
        grades = get_all([group.last.reference for group in over], None, waiting_for)
        for grader in self._graders:
            grader.note_success()
        taken = set(started)
        self._under_way = [group for group in self._under_way if group not in taken]
        return [GradedGroup(group.prompt, group.samples, own) for group, own in zip(started, grades, strict=True)]

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

    def _send(self, groups: Sequence[StartedGroup]) -> None:
        """Queue each engine's share in one call, so that the order it runs in is fixed."""
        for engine in {id(group.engine): group.engine for group in groups}.values():
            call, share = uuid4().hex, [group for group in groups if group.engine is engine]
            engine.actor.generate.remote(call, [group.request for group in share])
            for index, group in enumerate(share):
                group.sample(call, index)

    def _follow(self, timeout_s: float | None) -> None:
        """Wait until a call ends. Replace the actors that failed, and ask again for what was lost with any actor."""
        waiting = {group.call.reference: group for group in self._under_way if group.is_open}
        for group in [waiting[reference] for reference in ended(list(waiting), timeout_s)]:
            if (error := group.note_end()) is not None and not group.call.is_lost:
                if group.state == "sampling":
                    self._revive(group.engine, error)
                else:
                    group.grader.replace(self._start_deadline, error)
            PULSE.beat()
        lost = [group for group in self._under_way if group.is_open and group.call.is_lost]
        for group in lost:
            group.note_end()  # every call of a dead actor ends, and some ended well
            group.was_lost = True
        self._send([group for group in lost if group.state == "sampling"])
        for group in self._under_way:
            if group.is_open and group.grading.is_lost:
                group.grade()
