from __future__ import annotations

import pytest

from hpc_grpo.config.run import Every
from hpc_grpo.driver.schedule import Schedule, TrainLength

LENGTH = TrainLength(total_steps=12, items_per_step=4, items_per_epoch=10)
"""Epochs end in steps 3, 5, 8 and 10."""


def due(every: Every | None, seconds_per_step: float = 1.0) -> list[int]:
    """The steps at which it fires, each time counting the seconds anew."""
    now = 0.0
    schedule = Schedule(every, LENGTH, clock=lambda: now)
    fired = []
    for step in range(1, 13):
        now += seconds_per_step
        if schedule.is_due(step):
            fired.append(step)
            schedule.start_over()
    return fired


@pytest.mark.parametrize(
    ("every", "fired"),
    [
        (None, []),
        (Every(steps=5), [5, 10]),
        (Every(epochs=1), [3, 5, 8, 10]),
        (Every(epochs=2), [5, 10]),
        (Every(seconds=4.0), [4, 8, 12]),
        (Every(steps=5, seconds=4.0), [4, 5, 9, 10]),
        (Every(steps=7, epochs=3), [7, 8]),
    ],
)
def test_any_of_steps_epochs_and_seconds_fires(every: Every | None, fired: list[int]) -> None:
    assert due(every) == fired


def test_a_step_longer_than_the_seconds_fires_once() -> None:
    assert due(Every(seconds=1.0), seconds_per_step=100.0) == list(range(1, 13))


def test_it_is_foreseen_for_a_step_that_has_not_ended() -> None:
    schedule = Schedule(Every(seconds=10.0), LENGTH, clock=lambda: 0.0)
    assert not schedule.is_due(1)
    assert schedule.is_due(1, in_s=10.0)
