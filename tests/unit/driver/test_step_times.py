from __future__ import annotations

from hpc_grpo.driver.step_times import Durations, StepTimes
from hpc_grpo.run.progress import RunState


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
    measured = {"step_p95_s": 20.0, "eval_p95_s": 300.0, "save_p95_s": 100.0}
    pace = StepTimes.after(RunState(step=3, total_steps=9, attempt=1, phase="stopped", **measured))
    assert pace.step_and_save_s(evaluates=True) == 100.0, "a first step is always tried"
    pace.add_step({"time/step_s": 2.0})
    assert pace.step_and_save_s(evaluates=False) == 120.0
    assert pace.step_and_save_s(evaluates=True) == 420.0


def test_a_save_not_yet_measured_is_taken_to_last_as_long_as_a_step_but_not_less_than_30_s() -> None:
    pace = StepTimes.after(None)
    assert pace.step_and_save_s(evaluates=False) == 30.0
    pace.add_step({"time/step_s": 50.0})
    assert pace.step_and_save_s(evaluates=False) == 100.0


def test_an_eval_is_reserved_for_however_rare_and_only_where_it_is_due() -> None:
    pace = StepTimes.after(None)
    pace.saves.add(60.0)
    for step in range(1, 101):
        eval_s = {"time/eval_s": 290.0} if step % 20 == 0 else {}
        pace.add_step({"time/step_s": 10.0 + sum(eval_s.values()), **eval_s})
    assert pace.step_and_save_s(evaluates=False) == 70.0
    assert pace.step_and_save_s(evaluates=True) == 360.0


def test_a_save_that_fell_into_a_step_is_not_reserved_for_twice() -> None:
    pace = StepTimes.after(None)
    pace.saves.add(60.0)
    pace.add_step({"time/step_s": 72.0, "time/checkpoint_s": 60.0})
    assert pace.step_and_save_s(evaluates=False) == 72.0


def test_an_eval_not_yet_measured_is_taken_to_last_as_long_as_a_step() -> None:
    pace = StepTimes.after(None)
    pace.saves.add(60.0)
    pace.add_step({"time/step_s": 10.0})
    assert pace.step_and_save_s(evaluates=True) == 80.0
