"""The driver's handles to engines and graders, and the pool that sends groups to them.

A failed actor is replaced, and its unfinished calls are repeated. A group goes to the engine with the shortest queue,
and after sampling to a grader. In a synchronous run all queues are empty at the start of a step. A group's position in
the step then decides its engine, so a resumed run forms the same batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal
from uuid import uuid4

import ray
from ray.exceptions import RayError

from hpc_grpo.driver.remote import Deadline, as_raised, death, ended, errors_in_time, get_all
from hpc_grpo.driver.rollouts import GradedGroup, spread
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.errors import EngineLostError, GraderLostError, HpcGrpoError, LaunchError, NodesUnavailableError
from hpc_grpo.run.pulse import ASKED_AGAIN, PULSE
from hpc_grpo.types import GroupRequest, Prompt

MAX_RESTARTS = 3
"""Limit of an engine's restarts in an attempt, and of a grader's restarts in a row. Beyond it the driver stops."""


def is_engine_failure(error: Exception | None) -> bool:
    """Return whether a replacement engine may succeed after `error`, such as a dead engine or a lack of memory.

    Returns False for None and for HpcGrpoError: a wrong setting or damaged weights fail on every engine.
    """
    return error is not None and not isinstance(error, HpcGrpoError)


class RemoteActor:
    """Holds an actor in a reserved place of a node. `replace` starts a new actor there; `num_restarts` counts these."""

    _what: ClassVar[str]
    _lost: ClassVar[type[LaunchError]]

    def __init__(self, start: Callable[[], Any], address: str, deadline: Deadline) -> None:
        """`start` creates the actor on the node at `address`. A replacement must be ready within `deadline`."""
        self._start, self._address, self._deadline = start, address, deadline
        self._num_counted = self.num_restarts = 0
        self.actor = start()

    def replace(self, error: Exception) -> None:
        """Kill the actor, start another in its place, and wait until it is ready. `error` is the reason to print.

        Retries if the new actor fails too. Raises NodesUnavailableError if the node is lost. After MAX_RESTARTS
        restarts, raises EngineLostError or GraderLostError.
        """
        while True:
            first_line, _, _ = str(cause := as_raised(error)).strip().partition("\n")
            what = f"{self._what} on {self._address} {death(cause) or f'raised {type(cause).__name__}: {first_line}'}"
            if not any(node["Alive"] and node["NodeManagerAddress"] == self._address for node in ray.nodes()):
                raise NodesUnavailableError(f"{self._what} died with its node {self._address}.")
            if self._num_counted == MAX_RESTARTS:
                raise self._lost(f"{what}, after {MAX_RESTARTS} restarts. The logs in the attempt's folder say more.")
            # After an error the actor may still live, or be out of reach. Kill it: the next actor needs its place.
            ray.kill(self.actor)
            self.num_restarts += 1
            self._num_counted += 1
            print(f"{what}; starting another (restart {self.num_restarts}).", flush=True)
            with PULSE.working("start"):
                self.actor = self._start()
                try:
                    get_all([self.actor.ready.remote()], self._deadline, f"{self._what.lower()} that was started again")
                    return
                except (LaunchError, RayError) as next_error:
                    print(f"The new actor did not start: {next_error}", flush=True)
                    error = next_error


class RemoteEngine(RemoteActor):
    """An engine. `MAX_RESTARTS` limits all its restarts in an attempt."""

    _what, _lost = "An engine", EngineLostError


class RemoteGrader(RemoteActor):
    """A grader. `MAX_RESTARTS` limits restarts in a row: in a long run, a rare group may kill a grader now and then."""

    _what, _lost = "A grader", GraderLostError

    def note_success(self) -> None:
        """Reset the count of restarts in a row. Called when all groups of a wait are graded."""
        self._num_counted = 0


@dataclass(frozen=True)
class Call:
    """A call to an engine or a grader, with the actor that received it."""

    of: RemoteActor
    actor: Any
    reference: Any

    @property
    def is_lost(self) -> bool:
        """Whether another actor has replaced the called actor."""
        return self.actor is not self.of.actor


@dataclass(eq=False)
class StartedGroup:
    """A group in progress. The driver sets `state` when it sees that a call has ended.

    Engine and grader are called at the same time: Ray passes the samples to the grader when the engine has finished
    them. The reference of the engine's `call` becomes ready with `samples` and holds None: the driver never fetches
    samples.
    """

    prompt: Prompt
    request: GroupRequest
    with_texts: bool
    engine: RemoteEngine
    grader: RemoteGrader
    state: Literal["sampling", "grading", "done", "failed"] = "sampling"
    was_lost: bool = False
    samples: Any = field(init=False, repr=False)
    grading: Call = field(init=False, repr=False)
    call: Call = field(init=False, repr=False)
    """The call that an open group waits for. Then the last call, which holds the grades or the error."""

    @property
    def is_open(self) -> bool:
        return self.state in ("sampling", "grading")

    def sample(self, call: str, index: int) -> None:
        """Ask the engine for the samples of request `index` of `generate`'s `call`, and the grader for their grades."""
        actor = self.engine.actor
        self.samples, over = actor.samples.remote(call, index)
        self.call = Call(self.engine, actor, over)
        self.grade()

    def grade(self) -> None:
        actor = self.grader.actor
        self.grading = Call(self.grader, actor, actor.grade.remote(self.samples, self.prompt, self.with_texts))
        if self.state == "grading":
            self.call = self.grading

    def note_end(self) -> Exception | None:
        """Wait for the end of `call`, advance `state`, and return None.

        If the engine or grader of the call must be replaced, returns the error instead and keeps the state.
        """
        error = errors_in_time([self.call.reference], None).get(self.call.reference)
        if error and (is_engine_failure(error) if self.state == "sampling" else death(error)):
            return error
        if not error and self.state == "sampling":
            self.state, self.call = "grading", self.grading
        else:
            self.state = "failed" if error else "done"
        return None


class RolloutPool:
    """Sends groups through engines and graders."""

    def __init__(
        self,
        engines: Sequence[RemoteEngine],
        graders: Sequence[RemoteGrader],
        revive: Callable[[RemoteEngine, Exception], None],
    ) -> None:
        """`revive` replaces a failed engine, given its error, by an engine with the published weights."""
        self._engines, self._graders, self._revive = engines, graders, revive
        self._under_way: list[StartedGroup] = []
        self.on_progress: Callable[[str, int, int, int], None] = lambda *_: None

    def start(
        self, prompts: Sequence[Prompt], requests: Sequence[GroupRequest], with_texts: Sequence[bool]
    ) -> list[StartedGroup]:
        """Queue all groups, each on the engine with the shortest queue; engines with equal queues take turns.

        Lost groups of a replaced engine are queued first. Raises EngineLostError or GraderLostError after MAX_RESTARTS.
        """
        self._follow(0.0)
        sampling = [group.engine for group in self._under_way if group.state == "sampling"]
        loads = [sum(own is engine for own in sampling) for engine in self._engines]
        engines = [self._engines[index] for index in spread(len(prompts), loads)]
        graders = itertools.islice(itertools.cycle(self._graders), len(prompts))
        groups = list(map(StartedGroup, prompts, requests, with_texts, engines, graders))
        for group in groups:
            if group.prompt.images:  # into the object store: engine, grader and learner fetch them once
                images = ray.put(group.prompt.images)
                group.prompt = replace(group.prompt, images=images)
                group.request = replace(group.request, images=images)
        self._under_way += groups
        self._send(groups)
        return groups

    def wait(self, started: Sequence[StartedGroup], waiting_for: str) -> list[GradedGroup]:
        """Wait for the grades of all groups. Other started groups also progress.

        Raises the error of a failed group, and EngineLostError or GraderLostError after too many failures.
        """
        while any(group.is_open for group in started) and all(group.state != "failed" for group in started):
            if any(group.was_lost for group in self._under_way):
                PULSE.turn_to(ASKED_AGAIN)
            self._follow(None)
            states = [group.state for group in started]
            self.on_progress(waiting_for, len(states), len(states) - states.count("sampling"), states.count("done"))
        # Either all groups have ended, or one failed and `get_all` raises its error.
        over = [group for group in started if not group.is_open]
        grades = get_all([group.call.reference for group in over], None, waiting_for)
        for grader in self._graders:
            grader.note_success()
        taken = set(started)
        self._under_way = [group for group in self._under_way if group not in taken]
        return [GradedGroup(group.prompt, group.samples, own) for group, own in zip(started, grades, strict=True)]

    def restarts(self) -> dict[str, float]:
        kinds = {"engine": self._engines, "grading": self._graders}
        return {f"{kind}/restarts": sum(each.num_restarts for each in actors) for kind, actors in kinds.items()}

    def forget_prefixes(self) -> None:
        """Empty the engines' prefix caches. The next wait or publish replaces an engine that failed."""
        forgetting = [engine.actor.between_steps.remote(Sampler.forget_prefixes) for engine in self._engines]
        for error in errors_in_time(forgetting, None).values():
            if not is_engine_failure(error):
                raise error

    def _send(self, groups: Sequence[StartedGroup]) -> None:
        """Queue each engine's groups in one call, so that their order is fixed."""
        for engine in {id(group.engine): group.engine for group in groups}.values():
            call, share = uuid4().hex, [group for group in groups if group.engine is engine]
            engine.actor.generate.remote(call, [group.request for group in share])
            for index, group in enumerate(share):
                group.sample(call, index)

    def _follow(self, timeout_s: float | None) -> None:
        """Wait until a call ends. Replace failed actors and repeat the calls lost with them."""
        waiting = {group.call.reference: group for group in self._under_way if group.is_open}
        for group in [waiting[reference] for reference in ended(list(waiting), timeout_s)]:
            if (error := group.note_end()) is not None and not group.call.is_lost:
                if group.state == "sampling":
                    self._revive(group.engine, error)
                else:
                    group.grader.replace(error)
            PULSE.beat()
        lost = [group for group in self._under_way if group.is_open and group.call.is_lost]
        for group in lost:
            group.note_end()  # the calls of a dead actor end too, and some of them have results
            group.was_lost = True
        self._send([group for group in lost if group.state == "sampling"])
        for group in self._under_way:
            if group.is_open and group.grading.is_lost:
                group.grade()
