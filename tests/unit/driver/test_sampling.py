"""Engines that fail under their groups, with futures in the place of Ray's references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from hpc_grpo.driver.engines import RolloutPool
from hpc_grpo.errors import ConfigError, PromptError, RewardError
from hpc_grpo.types import GroupRequest, Prompt, SamplingSpec
from tests.support.ray_futures import FakeRay, Reference, answered, sampled

pytestmark = pytest.mark.usefixtures("fake_ray")
Outcome = Exception | str


class FakeEngine:
    """A RemoteEngine whose first actor answers with `outcome`, and all later ones with samples."""

    def __init__(self, outcome: Outcome) -> None:
        self.num_restarts = 0
        self.raised: list[Exception] = []
        self.actor = self._make_actor(outcome)

    def _make_actor(self, outcome: Outcome) -> Any:
        return SimpleNamespace(
            generate=SimpleNamespace(remote=lambda call, requests: None),
            samples=SimpleNamespace(remote=lambda call, index: sampled(answered(outcome))),
            between_steps=SimpleNamespace(remote=lambda method: answered(outcome)),
        )

    def revive(self, error: Exception) -> None:
        self.num_restarts += 1
        self.raised.append(error)
        self.actor = self._make_actor("samples")


class FakeGrader:
    """A RemoteGrader whose actors grade what comes, the first `num_mortal` of them with their death; see `grade`.

    Ray gives a call whose argument failed the argument's error.
    """

    def __init__(
        self, grade: Callable[[Prompt], Outcome], num_mortal: int = 0, death: type[Exception] = ActorDiedError
    ) -> None:
        self._death = death
        self._grade = grade
        self._num_mortal = num_mortal
        self.graded: list[int] = []
        self.num_restarts = 0
        self.num_successes = 0
        self.actor = self._make_actor()

    def _make_actor(self) -> Any:
        dies = self.num_restarts < self._num_mortal

        def call(samples: Reference, prompt: Prompt, with_texts: bool) -> Reference:
            error = samples.exception()
            if isinstance(error, RayTaskError):
                return answered(error.cause)
            if isinstance(error, Exception):
                return answered(error)
            if dies and prompt.ordinal > 0:  # one group was graded before
                return answered(self._death(""))
            self.graded.append(prompt.ordinal)
            return answered(self._grade(prompt))

        return SimpleNamespace(grade=SimpleNamespace(remote=call))

    def replace(self, error: Exception) -> None:
        assert isinstance(error, self._death)
        self.num_restarts += 1
        self.actor = self._make_actor()

    def note_success(self) -> None:
        self.num_successes += 1


def make_pool(engines: Sequence[FakeEngine], *graders: FakeGrader) -> RolloutPool:
    revive = lambda engine, error: engine.revive(error)  # noqa: E731
    return RolloutPool(engines, graders, revive)  # type: ignore[arg-type]


def sample(
    engines: Sequence[FakeEngine], grade: Callable[[Prompt], Outcome] | None = None, *, grader: FakeGrader | None = None
) -> list[Any]:
    """Four groups over the engines in turn; their grades."""
    pool = make_pool(engines, grader or FakeGrader(grade or graded))
    prompts = [Prompt(ordinal, 0, (1,), "p", {}) for ordinal in range(4)]
    requests = [GroupRequest(ordinal, (1,), (0,), SamplingSpec(1, 0, 1.0, 1.0)) for ordinal in range(4)]
    return [group.grades for group in pool.wait(pool.start(prompts, requests, [False] * 4), "rollouts")]


def graded(prompt: Prompt) -> str:
    return f"grades {prompt.ordinal}"


ALL_GRADES = [f"grades {ordinal}" for ordinal in range(4)]


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        OutOfMemoryError("1 worker(s) were killed"),
        RuntimeError("CUDA error: an illegal memory access"),
    ],
    ids=type,
)
def test_an_engine_that_dies_or_raises_is_replaced_and_asked_again(error: Exception) -> None:
    engines = [FakeEngine(error), FakeEngine("samples")]
    assert sample(engines) == ALL_GRADES
    assert [engine.raised for engine in engines] == [[error], []]


def test_engines_that_fail_together_are_all_replaced() -> None:
    engines = [FakeEngine(MemoryError("no blocks left")), FakeEngine(ActorDiedError())]
    assert sample(engines) == ALL_GRADES
    assert [engine.num_restarts for engine in engines] == [1, 1]


def test_an_error_that_is_meant_for_the_user_ends_the_wait() -> None:
    engines = [FakeEngine(PromptError("the prompt is longer than max_model_len")), FakeEngine("samples")]
    with pytest.raises(PromptError, match="the prompt is longer"):
        sample(engines)
    assert engines[0].num_restarts == 0


def test_an_error_for_the_user_is_told_where_the_grader_died_as_well() -> None:
    grader = FakeGrader(graded)
    grader.actor = SimpleNamespace(grade=SimpleNamespace(remote=lambda *_: answered(ActorDiedError())))
    with pytest.raises(PromptError, match="the prompt is longer"):
        sample([FakeEngine(PromptError("the prompt is longer than max_model_len"))], grader=grader)


@pytest.mark.parametrize("error", [RewardError("it returned no list"), ZeroDivisionError("division by zero")], ids=type)
def test_an_error_of_a_grader_replaces_no_engine(error: Exception) -> None:
    engines = [FakeEngine("samples"), FakeEngine("samples")]
    with pytest.raises(type(error)):
        sample(engines, lambda prompt: error if prompt.ordinal == 2 else "grades")
    assert [engine.num_restarts for engine in engines] == [0, 0]


@pytest.mark.parametrize(("num_deaths", "death"), [(1, ActorDiedError), (2, ActorDiedError), (1, OutOfMemoryError)])
def test_a_grader_that_dies_is_replaced_and_asked_for_what_it_had_not_graded(
    num_deaths: int, death: type[Exception]
) -> None:
    """Nothing is sampled again, and no group goes ungraded or is graded twice."""
    engines = [FakeEngine("samples"), FakeEngine("samples")]
    grader = FakeGrader(graded, num_deaths, death)
    assert sample(engines, grader=grader) == ALL_GRADES
    assert sorted(grader.graded) == [0, 1, 2, 3]
    assert (grader.num_restarts, grader.num_successes) == (num_deaths, 1)
    assert [engine.num_restarts for engine in engines] == [0, 0]


def test_an_engine_and_a_grader_that_die_together_are_both_replaced() -> None:
    engines = [FakeEngine(ActorDiedError()), FakeEngine("samples")]
    grader = FakeGrader(graded, num_mortal=1)
    assert sample(engines, grader=grader) == ALL_GRADES
    assert ([engine.num_restarts for engine in engines], grader.num_restarts) == ([1, 0], 1)


def test_samples_are_never_fetched_by_the_driver(fake_ray: FakeRay) -> None:
    sample([FakeEngine(RuntimeError("out of blocks")), FakeEngine("samples")])
    assert "samples" not in fake_ray.fetched


@pytest.mark.parametrize("error", [ActorDiedError(), RuntimeError("CUDA out of memory")], ids=type)
def test_an_engine_that_failed_is_passed_over_when_prefixes_are_forgotten(error: Exception, fake_ray: FakeRay) -> None:
    """The next wait or publish replaces it; the others have forgotten theirs by then."""
    engines = [FakeEngine(error), FakeEngine("forgotten")]
    make_pool(engines).forget_prefixes()
    assert fake_ray.fetched == ["forgotten"]
    assert [engine.num_restarts for engine in engines] == [0, 0]


def test_prefixes_that_a_well_engine_refuses_to_forget_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no prefix cache"):
        make_pool([FakeEngine("forgotten"), FakeEngine(ConfigError("no prefix cache"))]).forget_prefixes()


class SlowEngine:
    """A RemoteEngine whose groups end when a test says so, by their number among all that it was given."""

    num_restarts = 0

    def __init__(self) -> None:
        self.given: list[Reference] = []
        self.asked: list[int] = []
        self.actor = SimpleNamespace(
            generate=SimpleNamespace(remote=self._generate), samples=SimpleNamespace(remote=self._samples)
        )

    def _generate(self, call: str, requests: Sequence[GroupRequest]) -> None:
        self.asked += [request.ordinal for request in requests]

    def _samples(self, call: str, index: int) -> tuple[Reference, Reference]:
        self.given.append(Future())
        return sampled(self.given[-1])


class WaitingGrader(FakeGrader):
    """Grades each group when its samples come, as Ray calls an actor when its argument is there."""

    def _make_actor(self) -> Any:
        def call(samples: Reference, prompt: Prompt, with_texts: bool) -> Reference:
            grades: Reference = Future()

            def grade(_: Reference) -> None:
                self.graded.append(prompt.ordinal)
                grades.set_result(f"grades {prompt.ordinal}")

            samples.add_done_callback(grade)
            return grades

        return SimpleNamespace(grade=SimpleNamespace(remote=call))


def start(pool: RolloutPool, ordinals: Sequence[int]) -> list[Any]:
    prompts = [Prompt(ordinal, 0, (1,), "p", {}) for ordinal in ordinals]
    requests = [GroupRequest(ordinal, (1,), (0,), SamplingSpec(1, 0, 1.0, 1.0)) for ordinal in ordinals]
    return pool.start(prompts, requests, [False] * len(prompts))


def test_a_group_is_graded_as_soon_as_it_has_ended_itself() -> None:
    engines, grader = [SlowEngine(), SlowEngine()], WaitingGrader(graded)
    pool = RolloutPool(engines, [grader], lambda engine, error: None)  # type: ignore[arg-type]
    started = start(pool, range(4))
    engines[0].given[1].set_result("samples")
    assert grader.graded == [2], "its engine has another group of this call to sample, that comes before"
    for engine in engines:
        for reference in engine.given:
            if not reference.done():
                reference.set_result("samples")
    notes: list[Any] = []
    pool.on_progress = lambda *note: notes.append(note)
    assert [group.grades for group in pool.wait(started, "rollouts")] == ALL_GRADES
    assert notes[-1] == ("rollouts", 4, 4, 4)
    assert [graded for *_, graded in notes] == sorted(graded for *_, graded in notes)


def test_a_slow_engine_is_given_what_it_can_do_while_the_others_go_on() -> None:
    engines = [SlowEngine(), SlowEngine(), SlowEngine()]
    pool = RolloutPool(engines, [WaitingGrader(graded)], lambda *_: None)  # type: ignore[arg-type]
    start(pool, range(6))
    assert [engine.asked for engine in engines] == [[0, 3], [1, 4], [2, 5]]
    for engine in engines[1:]:
        for reference in engine.given:
            reference.set_result("samples")
    start(pool, range(6, 12))
    assert [engine.asked[2:] for engine in engines] == [[10], [6, 8, 11], [7, 9]], "up to three for each"


def test_engines_take_groups_in_turn_wherever_all_before_were_waited_for() -> None:
    """So an engine's share follows from the position in the step, however long engines took for the step before."""
    engines = [SlowEngine(), SlowEngine()]
    pool = RolloutPool(engines, [WaitingGrader(graded)], lambda *_: None)  # type: ignore[arg-type]
    for first in (0, 3):
        started = start(pool, range(first, first + 3))
        for engine in engines:
            for reference in engine.given:
                if not reference.done():
                    reference.set_result("samples")
        pool.wait(started, "rollouts")
    assert [engine.asked for engine in engines] == [[0, 2, 3, 5], [1, 4]]


class MortalEngine:
    """A RemoteEngine whose actors sample nothing until a test ends a call; `asked` has the calls of each actor."""

    def __init__(self) -> None:
        self.num_restarts = -1
        self.asked: list[list[list[int]]] = []
        self.replace()

    def replace(self) -> None:
        self.num_restarts += 1
        self.asked.append([])
        self.calls: list[Reference] = []
        calls, asked = self.calls, self.asked[-1]

        def samples(call: str, index: int) -> tuple[Reference, Reference]:
            calls.append(Future())
            return sampled(calls[-1])

        def generate(call: str, requests: Sequence[GroupRequest]) -> None:
            asked.append([request.ordinal for request in requests])

        self.actor = SimpleNamespace(generate=SimpleNamespace(remote=generate), samples=SimpleNamespace(remote=samples))

    def end(self, *numbers: int) -> None:
        for number in numbers:
            self.calls[number].set_result("samples")

    def die(self) -> None:
        for call in self.calls:
            if not call.done():
                call.set_exception(ActorDiedError())


class LateGrader(WaitingGrader):
    """Fails with its samples, too."""

    def _make_actor(self) -> Any:
        def call(samples: Reference, prompt: Prompt, with_texts: bool) -> Reference:
            grades: Reference = Future()

            def grade(_: Reference) -> None:
                if error := samples.exception():
                    grades.set_exception(error)
                else:
                    self.graded.append(prompt.ordinal)
                    grades.set_result(f"grades {prompt.ordinal}")

            samples.add_done_callback(grade)
            return grades

        return SimpleNamespace(grade=SimpleNamespace(remote=call))


def mortal_pool(engine: MortalEngine, revived: Callable[[], None]) -> tuple[RolloutPool, LateGrader]:
    def revive(_engine: Any, _error: Exception) -> None:
        engine.replace()
        revived()

    grader = LateGrader(graded)
    return RolloutPool([engine], [grader], revive), grader  # type: ignore[list-item]


def test_groups_of_later_steps_are_asked_again_together_with_those_waited_for() -> None:
    """One call for all that was lost, in the order of before; what was sampled is not sampled again."""
    engine = MortalEngine()
    pool, grader = mortal_pool(engine, lambda: ends_its_first_group_at_once(engine))
    steps = [start(pool, range(first, first + 2)) for first in (0, 2, 4)]
    engine.end(0, 3)
    engine.die()
    first = [group.grades for group in pool.wait(steps[0], "rollouts")]
    assert first == ["grades 0", "grades 1"]
    assert engine.asked == [[[0, 1], [2, 3], [4, 5]], [[1, 2, 4, 5]]]
    engine.end(1, 2, 3)
    assert [group.grades for group in pool.wait(steps[1] + steps[2], "rollouts")] == [
        f"grades {n}" for n in range(2, 6)
    ]
    assert sorted(grader.graded) == list(range(6)), "each once"
    assert engine.num_restarts == 1


def ends_its_first_group_at_once(engine: MortalEngine) -> None:
    """Let the engine's next actor end its first group at once."""
    actor = engine.actor
    ask = actor.samples.remote

    def samples(call: str, index: int) -> tuple[Reference, Reference]:
        references = ask(call, index)
        if len(engine.calls) == 1:
            engine.end(0)
        return references

    actor.samples = SimpleNamespace(remote=samples)


def test_groups_that_a_publish_lost_with_their_engine_are_queued_before_the_next_steps() -> None:
    engine = MortalEngine()
    pool, _ = mortal_pool(engine, lambda: None)
    start(pool, range(2))
    engine.end(0)
    engine.die()
    engine.replace()  # by the publish
    start(pool, range(2, 4))
    assert engine.asked == [[[0, 1]], [[1], [2, 3]]]


def test_an_error_of_a_later_step_waits_for_that_step() -> None:
    engine = MortalEngine()
    pool, _ = mortal_pool(engine, lambda: None)
    now, later = start(pool, [0]), start(pool, [1])
    engine.calls[1].set_exception(RayTaskError("call", "traceback", PromptError("too long")).as_instanceof_cause())
    engine.end(0)
    assert [group.grades for group in pool.wait(now, "rollouts")] == ["grades 0"]
    with pytest.raises(PromptError, match="too long"):
        pool.wait(later, "rollouts")
    assert engine.num_restarts == 0
