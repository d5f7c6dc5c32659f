"""What a run's own lines tell of the seconds of its engines and learners, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.frozen_config import write_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.simulate.measured import fit_rates, measured_steps, newest_attempt, read_measurements
from hpc_grpo.simulate.rates import Rates
from tests.support.configs import minimal_config
from tests.unit.simulate.runs import line, write_run


def config_of(lag: int = 0, **rollout: Any) -> Config:
    return minimal_config(rollout={"prompts_per_step": 2, "group_size": 4, "max_policy_lag": lag, **rollout})


def test_without_lag_engines_sample_while_the_driver_waits() -> None:
    lines = [line(step, wait=2.0, train=1.0, publish=0.5, between=0.25, checkpoint=0.25) for step in (1, 2)]
    for step in measured_steps(lines, config_of()):
        assert step.wait_s == 2.25, "from the publish on, over a save"
        assert (step.train_s, step.publish_s, step.between_s) == (1.0, 0.5, 0.25)
        assert (step.num_tokens, step.num_rollouts) == (800.0, 8)


def test_with_lag_a_save_is_the_learners_and_no_wait() -> None:
    lines = [line(step, wait=2.0, train=1.0, between=0.25, checkpoint=0.5) for step in (1, 2)]
    for step in measured_steps(lines, config_of(lag=1)):
        assert (step.wait_s, step.between_s) == (2.0, 0.75)


def test_groups_that_learners_leave_out_are_no_tokens_of_theirs() -> None:
    plain = line(1, wait=1.0, train=1.0, **{"reward/zero_variance_fraction": 0.25})
    (step,) = measured_steps([plain], config_of())
    assert step.trained_tokens == 800.0
    (step,) = measured_steps([plain], config_of(drop_zero_variance=True))
    assert step.trained_tokens == 600.0
    (step,) = measured_steps([plain | {"tokens/left_out_fraction": 0.5}], config_of())
    assert step.trained_tokens == 400.0
    chosen = plain | {"groups/sampled": 8.0, "groups/trained": 2.0}
    (step,) = measured_steps([chosen], config_of(dynamic_sampling=4))
    assert (step.trained_tokens, step.num_rollouts) == (200.0, 32)


def test_lengths_are_those_of_the_rollouts_in_shares_of_their_mean(tmp_path: Path) -> None:
    run, config = write_run(tmp_path, [line(step, wait=1.0, train=1.0) for step in (1, 2, 3)], total_steps=10)
    assert len(read_measurements(run, config).sequences.lengths) == 99, "as an exponential distribution has them"
    run.rollouts(0).parent.mkdir()
    run.eval_rollouts(2).write_text('{"completion": "xx"}\n{"completion": ""}\n')
    assert read_measurements(run, config).sequences.lengths == (1.5, 0.5)
    run.rollouts(3).write_text("".join(json.dumps({"completion": "x", "tokens": n}) + "\n" for n in (10, 30)))
    measured = read_measurements(run, config)
    assert measured.sequences.lengths == (0.5, 1.5)
    assert (measured.steps_to_go, measured.num_nodes) == (7, 1)
    assert measured.steps_per_h == 1800.0


def test_the_newest_attempt_with_enough_steps_is_taken(tmp_path: Path) -> None:
    lines = [line(step, wait=1.0, train=1.0) for step in (1, 2)]
    run, config = write_run(tmp_path / "short", lines, total_steps=10)
    with pytest.raises(ConfigError, match="no attempt of 3 steps or more to learn from: its 1 attempt took 2"):
        read_measurements(run, config)
    lines += [line(step, wait=2.0, train=2.0) | {"attempt": 2} for step in (3, 4, 5)]
    lines += [line(6, wait=1.0, train=1.0) | {"attempt": 3}]
    run, config = write_run(tmp_path / "long", lines, total_steps=10)
    measured = read_measurements(run, config)
    assert measured.steps_per_h == 900.0
    assert measured.steps_to_go == 4


def test_a_run_that_samples_nothing_is_refused(tmp_path: Path) -> None:
    config = minimal_config(task="sft")
    run = RunDir(tmp_path / "run")
    run.create()
    write_config(run, config)
    with pytest.raises(ConfigError, match="task = sft samples nothing"):
        read_measurements(run, config)


def test_the_newest_attempts_steps_are_read_and_its_nodes_and_the_end_of_the_run(tmp_path: Path) -> None:
    lines = [line(0, wait=900.0, train=0.0), line(1, wait=50.0, train=0.0)]
    lines += [line(step, wait=own, train=0.0) | {"attempt": 2} for step, own in ((2, 90.0), (3, 10.0), (4, 20.0))]
    run, config = write_run(tmp_path, lines, total_steps=184)
    attempt = newest_attempt(run, config)
    assert attempt is not None
    assert (attempt.median_step_s, len(attempt.lines), attempt.number, attempt.num_nodes) == (20.0, 3, 2, None)
    assert attempt.num_remaining_steps == 180


def test_without_a_finished_step_nothing_is_measured(tmp_path: Path) -> None:
    run, config = write_run(tmp_path, [line(0, wait=5.0, train=1.0)], total_steps=10)
    assert newest_attempt(run, config) is None  # only the eval before the first step
    run, config = write_run(tmp_path / "nan", [line(1, wait=math.nan, train=1.0)], total_steps=10)
    assert newest_attempt(run, config) is None


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
