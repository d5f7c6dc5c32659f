from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.driver.batches import Batch, TrainItem
from hpc_grpo.driver.learners import LearnerGroup
from hpc_grpo.learner.actor import WATCHING
from hpc_grpo.metrics.reductions import Mean
from hpc_grpo.types import RemoteGroup
from tests.support.ray_futures import Reference, answered


class FakeLearner:
    """A learner actor that notes the minibatches it is to train on."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.record: Path | None = None
        self.train = self

    def remote(self, minibatches: Any, record: Path | None, measured: Any) -> Reference:
        self.told, self.record, self.measured = minibatches, record, measured
        return answered({"items": Mean(len(minibatches[0].sequences))})


def item(name: str, num_tokens: int) -> TrainItem:
    return TrainItem(RemoteGroup(name, (0.5,), (True,)), num_tokens, num_tokens)


@pytest.mark.usefixtures("fake_ray")
def test_a_step_is_split_by_tokens_and_every_learner_is_told_the_tokens_of_all() -> None:
    learners = [FakeLearner(), FakeLearner()]
    first = [item("a", 50), item("b", 10), item("c", 30)]
    batch = Batch([first, [item("d", 7)]], range(4), {})
    assert LearnerGroup(learners).train(batch, Path("batches/step_1")) == {"items": 1.5}
    assert [learner.measured for learner in learners] == [None, None]
    assert [learner.record for learner in learners] == [Path("batches/step_1")] * 2
    shares = [[[each.samples for each in minibatch.sequences] for minibatch in learner.told] for learner in learners]
    assert shares == [[["a"], ["d"]], [["b", "c"], []]]
    assert [[minibatch.num_valid_tokens for minibatch in learner.told] for learner in learners] == [[90, 7]] * 2


@pytest.mark.usefixtures("fake_ray")
def test_what_tells_the_mismatch_is_dealt_out_and_every_learner_takes_part() -> None:
    learners = [FakeLearner(), FakeLearner()]
    chosen = RemoteGroup("a", (0.0,), (True,))
    LearnerGroup(learners).train(Batch([[]], range(1), {}, measured=[chosen]))
    assert [learner.measured for learner in learners] == [[chosen], []]


@pytest.mark.usefixtures("fake_ray")
def test_learners_that_share_rows_get_the_same_groups_and_count_once() -> None:
    learners = [FakeLearner() for _ in range(4)]
    chosen = [RemoteGroup(name, (0.0,), (True,)) for name in "mn"]
    batch = Batch([[item("a", 50), item("b", 10), item("c", 30)]], range(3), {}, measured=chosen)
    assert LearnerGroup(learners, sequence_parallel=2).train(batch) == {"items": 1.5}
    shares = [[each.samples for each in learner.told[0].sequences] for learner in learners]
    assert shares == [["a"], ["a"], ["b", "c"], ["b", "c"]]
    assert [[each.samples for each in learner.measured] for learner in learners] == [["m"], ["m"], ["n"], ["n"]]


class SlowLearner(FakeLearner):
    """A learner whose step ends once the driver has asked three times how far it is."""

    def __init__(self) -> None:
        super().__init__()
        self.microbatches = SimpleNamespace(options=self._options)
        self.num_asked = 0
        self.step: Reference = Future()

    def _options(self, *, concurrency_group: str) -> Any:
        assert concurrency_group == WATCHING
        return SimpleNamespace(remote=self._answer)

    def _answer(self) -> Reference:
        self.num_asked += 1
        if self.num_asked == 3:
            self.step.set_result({"items": Mean(1.0)})
        return answered((self.num_asked, 6))

    def remote(self, minibatches: Any, record: Path | None, measured: Any) -> Reference:
        return self.step


@pytest.mark.usefixtures("fake_ray")
def test_the_trained_microbatches_of_a_step_are_noted_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.driver.learners._ASKED_EVERY_S", 0.0)
    noted: list[tuple[int, int]] = []
    group = LearnerGroup([SlowLearner()])
    group.on_progress = lambda trained, total: noted.append((trained, total))
    assert group.train(Batch([[item("a", 5)], [item("b", 5)]], range(2), {})) == {"items": 1.0}
    assert noted == [(1, 6), (2, 6)]
