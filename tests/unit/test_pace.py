from __future__ import annotations

from hpc_grpo.metrics.state import RunState
from hpc_grpo.pace import Durations, Pace


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


def test_pace_goes_on_from_the_state_of_the_attempt_before() -> None:
    state = RunState(step=3, total_steps=9, attempt=1, phase="stopped", step_p95_s=20.0, save_p95_s=100.0)
    pace = Pace.after(state)
    assert pace.step_and_save_s == 100.0, "a first step is always tried"
    pace.steps.add(2.0)
    assert pace.step_and_save_s == 120.0


def test_a_save_not_yet_measured_is_taken_to_last_as_long_as_a_step_but_not_less_than_30_s() -> None:
    pace = Pace.after(None)
    assert pace.step_and_save_s == 30.0
    pace.steps.add(50.0)
    assert pace.step_and_save_s == 100.0
