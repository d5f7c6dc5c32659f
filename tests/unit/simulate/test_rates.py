"""What steps that differ, or hardly differ, tell of the seconds of engines and learners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.simulate.measured import read_measurements
from hpc_grpo.simulate.rates import Rates, fit_rates
from tests.unit.simulate.runs import line, write_run


def rates_of(folder: Path, lines: list[dict[str, Any]], **sections: Any) -> Rates:
    run, config = write_run(folder, lines, total_steps=10, **sections)
    return fit_rates(read_measurements(run, config), config)


def test_a_constant_and_a_share_of_the_tokens_are_told_apart(tmp_path: Path) -> None:
    lines = [line(n, wait=1.0, train=3.0 + own / 200, tokens=own) for n, own in enumerate((800.0, 400.0, 1200.0), 1)]
    training = rates_of(tmp_path, lines).training
    assert (training.fixed_s, training.part_s) == pytest.approx((3.0, 1 / 200))


def test_steps_that_are_alike_train_by_the_token_and_decode_by_the_step(tmp_path: Path) -> None:
    rates = rates_of(tmp_path, [line(step, wait=2.0, train=4.0) for step in (1, 2, 3)])
    assert (rates.training.fixed_s, rates.training.part_s) == pytest.approx((0.0, 4.0 / 800))
    assert rates.decoding.part_s == 0.0
    assert all(draw.sampling_factor == pytest.approx(1.0) for draw in rates.draws)


def test_lengths_that_are_cut_keep_their_mean(tmp_path: Path) -> None:
    lines = [line(step, wait=2.0, train=4.0, tokens=8 * 300.0) for step in (1, 2, 3)]
    draw = rates_of(tmp_path, lines).draws[0]
    assert draw.scale > 600.0, "of exponential lengths with a mean of 300, many are longer than 400"


def test_steps_that_trained_on_nothing_are_no_error(tmp_path: Path) -> None:
    alike = {"reward/zero_variance_fraction": 1.0}
    lines = [line(step, wait=2.0, train=0.5, **alike) for step in (1, 2, 3)]
    rates = rates_of(tmp_path, lines, rollout={"drop_zero_variance": True})
    assert (rates.training.fixed_s, rates.training.part_s) == (0.5, 0.0)
    mixed = [*lines[:2], line(3, wait=2.0, train=4.0, **{"reward/zero_variance_fraction": 0.5})]
    rates = rates_of(tmp_path / "mixed", mixed, rollout={"drop_zero_variance": True})
    assert rates.training(400.0) == pytest.approx(4.0, rel=0.2)
