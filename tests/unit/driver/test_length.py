from __future__ import annotations

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver.schedule import Durations, StepTimes, TrainLength, train_length
from hpc_grpo.run.progress import RunState
from tests.support.configs import minimal_config


def config(task: str = "grpo", **train: int) -> Config:
    if task == "sft":
        return minimal_config(task={"name": task, "args": {"batch_size": 10}}, train=train)
    return minimal_config(task=task, rollout={"prompts_per_step": 4, "group_size": 8}, train=train)


@pytest.mark.parametrize(
    ("train", "items", "steps"),
    [
        ({"total_steps": 7}, 100, 7),
        ({"total_episodes": 64}, 100, 2),
        ({"total_episodes": 65}, 100, 3),
        ({"total_epochs": 1}, 100, 25),
        ({"total_epochs": 2}, 10, 5),
        ({"total_epochs": 3}, 3, 3),
    ],
)
def test_steps_episodes_and_epochs_give_the_length_in_steps(train: dict[str, int], items: int, steps: int) -> None:
    assert train_length(config(**train), items).total_steps == steps


def test_episodes_of_sft_are_demonstrations() -> None:
    assert train_length(config("sft", total_episodes=95), 1000).total_steps == 10
    assert train_length(config("sft", total_epochs=2), 95).total_steps == 19


def test_every_epoch_is_trained_on_whole() -> None:
    """The last step covers the last item, and starts before the run's end."""
    for items in range(1, 40):
        length = train_length(config(total_epochs=2), items)
        assert (length.total_steps - 1) * 4 < 2 * items <= length.total_steps * 4


def test_a_step_belongs_to_the_epoch_it_starts_in() -> None:
    """Ten items in steps of four: steps 3 and 5 reach across the end of an epoch, and belong to where they start."""
    length = TrainLength(total_steps=5, items_per_step=4, items_per_epoch=10)
    assert [length.epoch_of(step) for step in range(6)] == [1, 1, 1, 1, 2, 2]
    assert length.total_epochs == 2


def test_a_last_step_that_reaches_into_the_next_epoch_does_not_add_one() -> None:
    assert TrainLength(total_steps=5, items_per_step=16, items_per_epoch=73).total_epochs == 1


def test_steps_larger_than_the_data() -> None:
    length = TrainLength(total_steps=3, items_per_step=8, items_per_epoch=3)
    assert [length.epoch_of(step) for step in (1, 2, 3)] == [1, 3, 6]
    assert length.total_epochs == 6


def test_nothing_is_known_before_the_first_duration() -> None:
    assert Durations().p95_s is None


def test_one_slow_step_in_twenty_counts_and_one_in_forty_does_not() -> None:
    durations = Durations()
    for seconds in [1.0] * 18 + [9.0] * 2:
        durations.add(seconds)
    assert durations.p95_s == 9.0
    for seconds in [1.0] * 40:
        durations.add(seconds)
    assert durations.p95_s == 1.0


def test_the_attempt_before_counts_until_there_are_enough() -> None:
    durations = Durations(earlier_p95_s=5.0)
    for _ in range(4):
        durations.add(1.0)
    assert durations.p95_s == 5.0
    durations.add(1.0)
    assert durations.p95_s == 1.0


def test_times_go_on_from_the_state_of_the_attempt_before() -> None:
    measured = {"step_p95_s": 20.0, "eval_p95_s": 300.0, "save_p95_s": 100.0}
    times = StepTimes.after(RunState(step=3, total_steps=9, attempt=1, phase="stopped", **measured))
    assert times.step_and_save_s(evaluates=True) == 100.0, "a first step is always tried"
    times.add_step({"time/step_s": 2.0})
    assert times.step_and_save_s(evaluates=False) == 120.0
    assert times.step_and_save_s(evaluates=True) == 420.0


def test_a_save_not_yet_measured_is_taken_to_last_as_long_as_a_step_but_not_less_than_30_s() -> None:
    times = StepTimes.after(None)
    assert times.step_and_save_s(evaluates=False) == 30.0
    times.add_step({"time/step_s": 50.0})
    assert times.step_and_save_s(evaluates=False) == 100.0


def test_an_eval_is_reserved_for_however_rare_and_only_where_it_is_due() -> None:
    times = StepTimes.after(None)
    times.saves.add(60.0)
    for step in range(1, 101):
        eval_s = {"time/eval_s": 290.0} if step % 20 == 0 else {}
        times.add_step({"time/step_s": 10.0 + sum(eval_s.values()), **eval_s})
    assert times.step_and_save_s(evaluates=False) == 70.0
    assert times.step_and_save_s(evaluates=True) == 360.0


def test_a_save_that_fell_into_a_step_is_not_reserved_for_twice() -> None:
    times = StepTimes.after(None)
    times.saves.add(60.0)
    times.add_step({"time/step_s": 72.0, "time/checkpoint_s": 60.0})
    assert times.step_and_save_s(evaluates=False) == 72.0


def test_an_eval_not_yet_measured_is_taken_to_last_as_long_as_a_step() -> None:
    times = StepTimes.after(None)
    times.saves.add(60.0)
    times.add_step({"time/step_s": 10.0})
    assert times.step_and_save_s(evaluates=True) == 80.0
