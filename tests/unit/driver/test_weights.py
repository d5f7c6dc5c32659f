"""The driver's side, on actors that answer at once: what it asks of whom, and how long it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError

from hpc_grpo.config import Config
from hpc_grpo.driver import weights as sync
from hpc_grpo.driver.remote import ActorLostError, Deadline, get_all
from hpc_grpo.driver.weights import Canary, NodeMembers, WeightSync
from hpc_grpo.engine.sampler import Sampler
from hpc_grpo.errors import WeightSyncError
from hpc_grpo.types import Completion, ParameterSpec, Prompt
from hpc_grpo.weights.store import StoredVersion
from tests.support.configs import minimal_config
from tests.support.ray_futures import Reference, answered

pytestmark = pytest.mark.usefixtures("fake_ray")
CANARY = Canary(minimal_config(), Prompt(0, 0, (1, 2), "", {}))
CONFIG = minimal_config(run={"name": "synced"}, deadlines={"start_s": 900.0, "silent_s": 10.0})


class FakeActor:
    """Answers the call of any method with what `answers` holds for it, called where it is a function."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __getattr__(self, method: str) -> Any:
        answer = self._answers.get(method)
        return SimpleNamespace(
            remote=lambda *args, **options: answered(answer(*args, **options) if callable(answer) else answer)
        )


STAGED = StoredVersion(4, (17,))


def make_learner(**answers: Any) -> FakeActor:
    specs = [ParameterSpec("a", (4,), "float32")]
    defaults = {"parameter_specs": specs, "open_weight_store": Path("/dev/shm/x"), "stage_weights": STAGED}
    defaults["score"] = lambda _prompt, completions, _images: [np.full(len(each), -1.0) for each in completions]
    return FakeActor(**(defaults | answers))


def answer(*token_ids: int) -> Completion:
    tokens = np.array(token_ids, dtype=np.int32)
    logprobs = np.full(len(tokens), -1.0, dtype=np.float32)
    return Completion(tokens, logprobs, np.full(len(tokens), 4, dtype=np.int32), "length")


def make_sync(nodes: Sequence[tuple[Sequence[FakeActor], Sequence[Any]]], config: Config = CONFIG) -> WeightSync:
    members = [NodeMembers(learners, engines) for learners, engines in nodes]
    weights = WeightSync(config, members)
    weights.connect(CANARY)
    return weights


def test_weight_stores_have_the_deadline_of_the_start_and_a_publish_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of 140 GiB takes minutes to allocate, once; a publish that takes so long is stuck."""
    waits: dict[str, Deadline | None] = {}

    def noted(references: Sequence[Any], deadline: Deadline | None, waiting_for: str) -> list[Any]:
        waits[waiting_for] = deadline
        return get_all(references, deadline, waiting_for)

    monkeypatch.setattr(sync, "get_all", noted)
    weights = make_weights([FakeEngine()])
    assert waits["the weight stores"] == Deadline(900.0, "deadlines.start_s")
    weights.publish(4)
    assert waits["the publish of weight version 4"] == Deadline(20.0, "2 times deadlines.silent_s")


class FakeEngine:
    """A RemoteEngine that answers a publish with `outcome` until it is replaced.

    `joins`, `loads` and `verifies` are its answers to the calls to join a group, to load the store and to verify what
    was staged, in order; None after those.
    """

    def __init__(
        self,
        outcome: Exception | Completion | None = None,
        joins: Sequence[Exception | None] = (),
        loads: Sequence[Exception | None] = (),
        verifies: Sequence[Exception | None] = (),
    ) -> None:
        self.failures: list[Exception] = []
        self.joined = 0
        self.loaded = 0
        self._joins = iter(joins)
        self._loads = iter(loads)
        self._verifies = iter(verifies)
        self.verified: list[StoredVersion] = []
        self.actor = self._make_actor(outcome)

    def replace(self, error: Exception) -> None:
        self.failures.append(error)
        self.actor = self._make_actor(None)

    def _make_actor(self, outcome: Exception | Completion | None) -> FakeActor:
        return FakeActor(
            contract_differences=[],
            receive_weights=outcome or answer(5),
            join_weight_group=self._join,
            between_steps=self._load,
            verify_weights=self._verify,
        )

    def _verify(self, staged: StoredVersion) -> Exception | None:
        self.verified.append(staged)
        return next(self._verifies, None)

    def _join(self, *_: Any) -> Exception | None:
        self.joined += 1
        return next(self._joins, None)

    def _load(self, method: Callable[..., Any]) -> Exception | None:
        if method is not Sampler.load_stored_weights:
            return None
        self.loaded += 1
        return next(self._loads, None)


def test_an_engine_that_raises_over_a_publish_is_replaced_and_its_node_joins_anew() -> None:
    error = RuntimeError("CUDA out of memory")
    engines = [FakeEngine(), FakeEngine(error), FakeEngine()]
    # The learner hears of it as well, and only that a worker failed.
    failed = iter([WeightSyncError("engine workers [2] did not load weight version 4"), None])
    learner = make_learner(announce_weights=lambda: next(failed))
    make_sync([([learner], engines[:2]), ([make_learner()], engines[2:])]).publish(4)
    assert [engine.failures for engine in engines] == [[], [error], []]
    assert [engine.joined for engine in engines] == [2, 2, 1]


def test_damaged_weights_end_the_publish_with_the_engines_own_error() -> None:
    engines = [FakeEngine(), FakeEngine(WeightSyncError("checksum mismatch in bucket 0"))]
    weights = make_weights(engines)
    with pytest.raises(WeightSyncError, match="Publishing weight version 4 failed: checksum mismatch in bucket 0"):
        weights.publish(4)
    assert [engine.failures for engine in engines] == [[], []]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_publish_names_the_engines_error_that_came_first(order: tuple[int, int]) -> None:
    """The publisher, and the other engine of the group, only see that one has left it."""
    cause, late = answered(WeightSyncError("checksum mismatch in bucket 0")), Reference()
    engines = [FakeEngine(), FakeEngine()]
    for place, call in zip(order, (cause, late), strict=True):
        engines[place].actor = FakeActor(contract_differences=[], join_weight_group=None, verify_weights=None)
        engines[place].actor.receive_weights = SimpleNamespace(remote=lambda *_, call=call: call)
    threading.Timer(0.3, late.set_exception, [answered(WeightSyncError("the group broke")).exception()]).start()
    learner = make_learner(announce_weights=WeightSyncError("engine workers did not load weight version 4"))
    with pytest.raises(WeightSyncError, match="failed: checksum mismatch in bucket 0"):
        make_sync([([learner], engines)]).publish(4)


def test_each_nodes_engines_verify_what_their_own_learner_staged() -> None:
    theirs = StoredVersion(4, (18,))
    silent = make_learner(open_weight_store=None, stage_weights=None)
    learners = [make_learner(), silent, make_learner(stage_weights=theirs)]
    engines = [FakeEngine(), FakeEngine(), FakeEngine()]
    make_sync([(learners[:2], engines[:2]), (learners[2:], engines[2:])]).publish(4)
    assert [engine.verified for engine in engines] == [[STAGED], [STAGED], [theirs]]


def test_damage_found_beside_the_sampling_ends_the_publish_before_any_engine_pauses() -> None:
    paused: list[int] = []
    engine = FakeEngine(verifies=[WeightSyncError("checksum mismatch in bucket 0")])
    learner = make_learner(announce_weights=lambda: paused.append(1))
    with pytest.raises(WeightSyncError, match="Publishing weight version 4 failed: checksum mismatch in bucket 0"):
        make_sync([([learner], [engine])]).publish(4)
    assert (engine.failures, paused) == ([], [])


def test_an_engine_that_dies_as_it_verifies_is_replaced_and_the_publish_goes_on() -> None:
    engines = [FakeEngine(), FakeEngine(verifies=[DEAD])]
    make_weights(engines).publish(4)
    assert [engine.failures for engine in engines] == [[], [DEAD]]
    assert [engine.joined for engine in engines] == [2, 2]


def make_weights(engines: Sequence[FakeEngine]) -> WeightSync:
    return make_sync([([make_learner()], engines)])


OUT_OF_MEMORY = RuntimeError("CUDA out of memory")
DEAD = ActorDiedError()
GROUP_BROKE = WeightSyncError("the node's weight group did not form at rank 2")


def test_a_learner_that_dies_over_a_publish_is_named_and_no_engine_is_blamed() -> None:
    """Engines are to go on under the next driver, which a WeightSyncError would keep them from."""
    engine = FakeEngine(WeightSyncError("the node's weight group broke at rank 1"))
    with pytest.raises(ActorLostError, match="A learner died over the publish of weight version 4"):
        make_sync([([make_learner(announce_weights=DEAD)], [engine])]).publish(4)
    assert engine.failures == []


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, DEAD], ids=type)
def test_an_engine_that_fails_as_its_node_joins_is_replaced_and_the_others_are_not(error: Exception) -> None:
    engines = [FakeEngine(OUT_OF_MEMORY), FakeEngine(joins=[None, error]), FakeEngine(joins=[None, GROUP_BROKE])]
    make_weights(engines).publish(4)
    assert [engine.failures for engine in engines] == [[OUT_OF_MEMORY], [error], []]
    assert [engine.joined for engine in engines] == [3, 3, 3]


def test_engines_that_died_together_are_all_replaced_before_a_group_waits_for_one_of_them() -> None:
    engines = [FakeEngine(OUT_OF_MEMORY), FakeEngine(), FakeEngine()]
    weights = make_weights(engines)
    engines[2].actor = FakeActor(ready=DEAD)
    weights.revive(engines[0], DEAD)  # type: ignore[arg-type]
    assert [engine.failures for engine in engines] == [[DEAD], [], [DEAD]]
    assert [engine.joined for engine in engines] == [2, 2, 2], "the first time at the start"


def test_an_engine_that_fails_at_the_first_join_is_replaced() -> None:
    engines = [FakeEngine(), FakeEngine(joins=[DEAD])]
    make_weights(engines)
    assert [engine.failures for engine in engines] == [[], [DEAD]]


def test_a_group_that_does_not_form_for_no_engines_fault_is_an_error() -> None:
    engines = [FakeEngine(joins=[GROUP_BROKE])]
    with pytest.raises(WeightSyncError, match=str(GROUP_BROKE)):
        make_weights(engines)
    assert engines[0].failures == []


def test_an_engine_that_fails_as_it_loads_the_stored_version_is_replaced_again() -> None:
    engines = [FakeEngine(loads=[OUT_OF_MEMORY]), FakeEngine()]
    weights = make_weights(engines)
    weights.revive(engines[0], DEAD)  # type: ignore[arg-type]
    assert engines[0].failures == [DEAD, OUT_OF_MEMORY]
    assert [engine.loaded for engine in engines] == [2, 0]
    assert engines[1].failures == []


def test_every_learner_scores_each_answer_to_the_probe_once_and_the_farthest_engine_is_told() -> None:
    asked: list[tuple[Sequence[int], Sequence[Sequence[int]]]] = []

    def score(prompt: Sequence[int], completions: Sequence[Sequence[int]], images: object) -> list[Any]:
        asked.append((prompt, completions))
        return [np.full(len(each), -1.0 - 0.01 * index, dtype=np.float32) for index, each in enumerate(completions)]

    engines = [FakeEngine(answer(5, 6)), FakeEngine(answer(7)), FakeEngine(answer(5, 6))]
    weights = make_sync([([make_learner(score=score)], engines[:2]), ([make_learner(score=score)], engines[2:])])
    assert weights.publish(4) == {"mismatch/canary": pytest.approx(0.01, rel=1e-4)}
    assert asked == [((1, 2), [(5, 6), (7,)])] * 2


def test_engines_that_share_gpus_wake_once_the_learners_have_freed_them_and_before_weights_come() -> None:
    asked: list[str] = []

    def noted(what: str, value: Any = None) -> Callable[..., Any]:
        return lambda *_args, **_options: asked.append(what) or value

    def stage(_version: int) -> StoredVersion:
        asked.append("stage_weights")
        return STAGED

    calls = {call: noted(call) for call in ("free_cached_memory", "announce_weights")}
    learner = make_learner(stage_weights=stage, **calls)
    engine = FakeEngine()
    engine.actor = FakeActor(
        contract_differences=[],
        receive_weights=noted("receive_weights", answer(5)),
        verify_weights=noted("verify_weights"),
        between_steps=lambda method: asked.append(method.__name__),
    )
    config = CONFIG.model_copy(update={"placement": CONFIG.placement.model_copy(update={"colocate": True})})
    weights = make_sync([([learner], [engine])], config)
    weights.put_engines_to_sleep()
    weights.publish(4)
    staging = ["stage_weights", "free_cached_memory", "verify_weights"]
    assert asked == ["sleep", *staging, "wake_up", "receive_weights", "announce_weights"]


def test_the_place_of_an_engine_that_died_asleep_is_filled_once_learners_have_freed_its_gpu() -> None:
    asked: list[str] = []
    learner = make_learner(free_cached_memory=lambda: asked.append("freed"))
    engine = FakeEngine(verifies=[DEAD])
    engine.replace = lambda error: asked.append("replaced")  # type: ignore[method-assign]
    config = CONFIG.model_copy(update={"placement": CONFIG.placement.model_copy(update={"colocate": True})})
    make_sync([([learner], [engine])], config).publish(4)
    assert asked == ["freed", "replaced"]


def test_an_engine_that_does_not_fall_asleep_is_replaced_and_the_next_one_sleeps() -> None:
    engine = FakeEngine()
    engine.actor = FakeActor(contract_differences=[], between_steps=OUT_OF_MEMORY)
    make_weights([engine]).put_engines_to_sleep()
    assert engine.failures == [OUT_OF_MEMORY]
