"""The driver's loop against simulated engines, and one engine: seconds by hand, and the pipeline's bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from hpc_grpo.config import Config
from hpc_grpo.simulate.cluster import Setting, SimulatedEngine, SimulatedRun, Wave, forecast
from hpc_grpo.simulate.measured import MeasuredStep, Measurements, measured_rates
from hpc_grpo.simulate.rates import DrawnStep, Rate, Rates, Sequences
from tests.support.configs import minimal_config


def turns(*lengths: int) -> list[list[tuple[int, float]]]:
    """Return rollouts of one turn."""
    return [[(length, 0.0)] for length in lengths]


EVERY = Sequences((1.0,), 16, leaves_out=True)


def config_of(**train: int) -> Config:
    rollout = {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 100}
    engine = {"engines_per_node": 2, "vllm": {"max_num_seqs": 4}}
    return minimal_config(rollout=rollout, engine=engine, train={"total_steps": 100, **train})


def rates_of(alike_share: float = 0.0, training_s: float = 1e-3) -> Rates:
    """Completions of 50 tokens at 10 ms each: half a second for an engine with four of them."""
    draw = DrawnStep(50.0, 1.0, 1.0, publish_s=0.05, between_s=0.02, alike_share=alike_share)
    return Rates(decoding=Rate(0.01, 0.0), training=Rate(0.0, training_s), draws=(draw,), sequences=EVERY)


def test_without_lag_engines_and_learners_take_turns() -> None:
    found = forecast(config_of(), rates_of(), Setting(nodes=1, learners=1, engines=2, lag=0))
    step_s = 0.5 + 8 * 50 * 1e-3 + 0.05 + 0.02
    assert found.steps_per_h == pytest.approx(3600 / step_s)
    assert found.engines_idle == pytest.approx(1 - 0.5 / step_s)
    assert found.learners_idle == pytest.approx(1 - 0.4 / step_s)
    assert found.node_hours(10) == pytest.approx(10 * step_s / 3600)


def test_more_learners_share_the_tokens_and_more_engines_the_groups() -> None:
    found = forecast(config_of(), rates_of(), Setting(nodes=1, learners=4, engines=1, lag=0))
    assert 3600 / found.steps_per_h == pytest.approx(1.0 + 0.1 + 0.07), "eight sequences, four at once"
    found = forecast(config_of(), rates_of(), Setting(nodes=8, learners=1, engines=1, lag=0))
    assert 3600 / found.steps_per_h == pytest.approx(0.5 + 0.1 + 0.07)
    assert found.engines_idle == pytest.approx(1 - 0.5 / 0.67 / 2), "half of the eight get no group"


@pytest.mark.parametrize(("training_s", "bound_s"), [(1e-3, 0.5), (2e-3, 0.87), (4e-3, 1.67)])
@pytest.mark.parametrize("lag", [1, 2])
def test_with_lag_the_slower_of_the_two_sets_the_pace(training_s: float, bound_s: float, lag: int) -> None:
    found = forecast(config_of(), rates_of(training_s=training_s), Setting(1, 1, 2, lag))
    assert 3600 / found.steps_per_h == pytest.approx(bound_s, rel=0.02)


def test_lag_counts_optimizer_steps() -> None:
    setting = Setting(1, 1, 2, lag=1)
    one = forecast(config_of(num_minibatches=1), rates_of(), setting)
    two = forecast(config_of(num_minibatches=2), rates_of(), setting)
    assert two.steps_per_h < 0.6 * one.steps_per_h, "less than a step ahead is no step ahead"


def test_learners_compute_nothing_of_groups_that_are_alike() -> None:
    found = forecast(config_of(), rates_of(alike_share=1.0), Setting(1, 1, 2, 0))
    assert found.learners_idle == 1.0


@pytest.mark.parametrize("training_s", [5e-4, 1e-3, 3e-3], ids=["engines set the pace", "neither", "learners do"])
def test_what_engines_take_behind_training_is_found_from_the_waits(training_s: float) -> None:
    """A run that was simulated is the one measured: a decode step took 10 ms."""
    config = config_of().model_copy(update={"rollout": config_of().rollout.model_copy(update={"max_policy_lag": 2})})
    run = SimulatedRun(config, rates_of(training_s=training_s), Setting(1, 1, 2, lag=2))
    marks = [0.0]
    run.take_steps(20, lambda: marks.append(run.waited_s))
    steps = tuple(
        MeasuredStep(400.0, 8, 400.0, after - before, 400 * training_s, 0.05, 0.02, 0.0)
        for before, after in itertools.pairwise(marks)
    )
    measured = Measurements(steps, EVERY, 1, 20.0, 100, "")
    assert measured_rates(measured, config).decoding(4.0) == pytest.approx(0.01, rel=0.02)


def test_an_engine_at_half_speed_is_given_less_and_holds_up_no_other() -> None:
    """Four engines do 16 groups in a second; with 3.5 of them that is 1.14 s, and dealt out in turn it would be 2."""
    rollout = {"prompts_per_step": 16, "group_size": 2, "max_new_tokens": 100, "max_policy_lag": 4}
    config = minimal_config(rollout=rollout, engine={"engines_per_node": 4, "vllm": {"max_num_seqs": 4}})
    run = SimulatedRun(config, rates_of(training_s=1e-4), Setting(1, 1, 4, lag=4))
    run.engines[0] = SimulatedEngine(Rate(0.02, 0.0), max_num_seqs=4)
    ends: list[float] = []
    run.take_steps(30, lambda: ends.append(run.now))
    assert (ends[-1] - ends[9]) / 20 < 1.25


def constant(_running: float) -> float:
    return 1.0


@pytest.mark.parametrize(("max_num_seqs", "ends_at"), [(2, 4.0), (1, 6.0)])
def test_sequences_take_turns_where_there_is_no_room_for_all(max_num_seqs: int, ends_at: float) -> None:
    engine = SimulatedEngine(constant, max_num_seqs)
    assert engine.end_of(engine.submit(turns(2, 4), 0.0)) == ends_at


def test_a_decode_step_costs_by_what_runs_in_it() -> None:
    engine = SimulatedEngine(lambda running: running, max_num_seqs=8)
    assert engine.end_of(engine.submit(turns(2, 4), 0.0)) == 2 * 2 + 2 * 1


def test_what_comes_later_shares_the_engine_from_then_on() -> None:
    engine = SimulatedEngine(lambda running: running, max_num_seqs=8)
    first = engine.submit(turns(4), 0.0)
    second = engine.submit(turns(4), 2.0)
    assert engine.end_of(first) == 2 + 2 * 2
    assert engine.end_of(second) == 6 + 2


def test_a_later_call_waits_for_room_and_does_not_hold_up_the_one_before() -> None:
    engine = SimulatedEngine(constant, max_num_seqs=1)
    first, second = engine.submit(turns(3), 0.0), engine.submit(turns(2), 0.0)
    assert (engine.end_of(second), engine.end_of(first)) == (5.0, 3.0)


def test_an_engine_is_busy_while_something_runs() -> None:
    engine = SimulatedEngine(constant, max_num_seqs=4)
    engine.submit(turns(2), 0.0)
    engine.submit(turns(3), 10.0, factor=2.0)
    engine.advance(12.0)
    assert engine.busy_s == 2 + 2, "the rest of the second comes after what was asked for"
    engine.advance(100.0)
    assert engine.busy_s == 2 + 6


@pytest.mark.parametrize(("wave", "ends_at"), [(None, 12.0), (Wave(), 14.0)], ids=["each by itself", "in a wave"])
def test_a_turn_begins_when_its_environment_has_answered_and_in_a_wave_when_the_last_one_has(
    wave: Wave | None, ends_at: float
) -> None:
    engine = SimulatedEngine(constant, max_num_seqs=4)
    call = engine.submit([[(2, 1.0), (3, 0.0)], [(2, 4.0), (2, 4.0)]], 0.0, wave=wave)
    engine.advance(1.0)
    assert engine.load(5.9) == 1
    assert engine.end_of(call) == 12.0
    assert engine.busy_s == (2 + 3 + 2 if wave is None else 2 + 3)


def test_a_slot_is_free_while_an_environment_thinks() -> None:
    engine = SimulatedEngine(constant, max_num_seqs=1)
    first, second = engine.submit([[(2, 9.0), (1, 0.0)]], 0.0), engine.submit(turns(5), 0.0)
    assert (engine.end_of(second), engine.end_of(first), engine.busy_s) == (7.0, 12.0, 8.0)


def test_environments_make_steps_longer_and_a_lag_hides_them() -> None:
    rates = replace(rates_of(), sequences=replace(EVERY, turns=5.0, environment_s=0.2))
    alone = forecast(config_of(), rates_of(), Setting(1, 1, 2, lag=0))
    in_turn, ahead = (forecast(config_of(), rates, Setting(1, 1, 2, lag)) for lag in (0, 2))
    assert in_turn.step_s > alone.step_s + 5 * 0.2
    assert ahead.step_s < 0.6 * in_turn.step_s
    assert ahead.engines_idle < in_turn.engines_idle


def test_the_decode_step_of_a_run_with_environments_is_found_from_its_waits() -> None:
    sequences = replace(EVERY, turns=3.0, environment_s=0.1)
    run = SimulatedRun(config_of(), replace(rates_of(), sequences=sequences), Setting(1, 1, 2, lag=0))
    marks = [0.0]
    run.take_steps(20, lambda: marks.append(run.waited_s))
    steps = tuple(
        MeasuredStep(400.0, 8, 400.0, after - before, 0.4, 0.05, 0.02, 0.0)
        for before, after in itertools.pairwise(marks)
    )
    measured = Measurements(steps, sequences, 1, 20.0, 100, "")
    assert measured_rates(measured, config_of()).decoding(4.0) == pytest.approx(0.01, rel=0.25)
