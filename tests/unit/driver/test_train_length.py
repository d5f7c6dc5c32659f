from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.driver.train_length import TrainLength, train_length


def config(task: str = "grpo", **train: int) -> Config:
    values: dict[str, Any] = {
        "run": {"name": "r"},
        "task": task,
        "model": {"path": "m"},
        "data": {"train": {"path": "d"}},
        "rollout": {"prompts_per_step": 4, "group_size": 8},
        "sft": {"batch_size": 10},
        "train": train,
    }
    return Config.model_validate(values)


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
def test_length_in_steps(train: dict[str, int], items: int, steps: int) -> None:
    assert train_length(config(**train), items).total_steps == steps


def test_episodes_of_sft_are_demonstrations() -> None:
    assert train_length(config("sft", total_episodes=95), 1000).total_steps == 10
    assert train_length(config("sft", total_epochs=2), 95).total_steps == 19


def test_every_epoch_is_trained_on_whole() -> None:
    """The last step covers the last item, and starts before the budget's end."""
    for items in range(1, 40):
        budget = train_length(config(total_epochs=2), items)
        assert (budget.total_steps - 1) * 4 < 2 * items <= budget.total_steps * 4


def test_place_of_a_step() -> None:
    """Ten items in steps of four: steps 3 and 5 reach across the end of an epoch, and belong to where they start."""
    budget = TrainLength(total_steps=5, items_per_step=4, items_per_epoch=10)
    assert [budget.epoch_and_step(step) for step in range(1, 6)] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]
    assert (budget.steps_per_epoch, budget.total_epochs) == (3, 2)
    assert budget.epoch_and_step(0) == (1, 1)


def test_steps_larger_than_the_data() -> None:
    budget = TrainLength(total_steps=3, items_per_step=8, items_per_epoch=3)
    assert [budget.epoch_and_step(step) for step in (1, 2, 3)] == [(1, 1), (3, 1), (6, 1)]
    assert (budget.steps_per_epoch, budget.total_epochs) == (1, 8)
