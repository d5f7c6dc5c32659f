from __future__ import annotations

import pytest

from hpc_grpo.metrics.record import StepTimer


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_start_over_each_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    for seconds in (1.0, 2.0):
        with timer.phase("generate_wait"):
            clock.now += seconds
        clock.now += 0.5
    assert timer.finish_step() == {"time/generate_wait_s": 3.0, "time/step_s": 4.0}
    clock.now += 7.0
    assert timer.finish_step() == {"time/step_s": 7.0}


def test_phase_that_raises_is_counted_and_raises_on() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    with pytest.raises(ZeroDivisionError), timer.phase("train"):
        clock.now += 2.0
        raise ZeroDivisionError
    assert timer.finish_step()["time/train_s"] == 2.0


def test_what_comes_before_the_first_step_does_not_count_for_the_eta() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    clock.now += 500.0
    timer.finish_step()  # the eval before the first step
    timer.start_over()
    assert timer.eta_s(10) is None
    clock.now += 2.0
    timer.finish_step()
    assert timer.eta_s(10) == 20.0


def test_eta_is_not_moved_by_one_slow_step() -> None:
    clock = Clock()
    timer = StepTimer(clock)
    assert timer.eta_s(10) is None
    for seconds in (1.0, 1.0, 60.0, 1.0):
        clock.now += seconds
        timer.finish_step()
    assert timer.eta_s(10) == 10.0
