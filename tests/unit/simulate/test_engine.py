"""When completions end in a simulated engine, by hand."""

from __future__ import annotations

import pytest

from hpc_grpo.simulate.engine import SimulatedEngine


def constant(_running: float) -> float:
    return 1.0


@pytest.mark.parametrize(("max_num_seqs", "ends_at"), [(2, 4.0), (1, 6.0)])
def test_sequences_take_turns_where_there_is_no_room_for_all(max_num_seqs: int, ends_at: float) -> None:
    engine = SimulatedEngine(constant, max_num_seqs)
    assert engine.end_of(engine.submit([2, 4], 0.0)) == ends_at


def test_a_decode_step_costs_by_what_runs_in_it() -> None:
    engine = SimulatedEngine(lambda running: running, max_num_seqs=8)
    assert engine.end_of(engine.submit([2, 4], 0.0)) == 2 * 2 + 2 * 1


def test_what_comes_later_shares_the_engine_from_then_on() -> None:
    engine = SimulatedEngine(lambda running: running, max_num_seqs=8)
    first = engine.submit([4], 0.0)
    second = engine.submit([4], 2.0)
    assert engine.end_of(first) == 2 + 2 * 2
    assert engine.end_of(second) == 6 + 2


def test_a_later_call_waits_for_room_and_does_not_hold_up_the_one_before() -> None:
    engine = SimulatedEngine(constant, max_num_seqs=1)
    first, second = engine.submit([3], 0.0), engine.submit([2], 0.0)
    assert (engine.end_of(second), engine.end_of(first)) == (5.0, 3.0)


def test_an_engine_is_busy_while_something_runs() -> None:
    engine = SimulatedEngine(constant, max_num_seqs=4)
    engine.submit([2], 0.0)
    engine.submit([3], 10.0, factor=2.0)
    engine.finish_all(12.0)
    assert engine.busy_s == 2 + 2, "the rest of the second comes after what was asked for"
    engine.finish_all(100.0)
    assert engine.busy_s == 2 + 6
