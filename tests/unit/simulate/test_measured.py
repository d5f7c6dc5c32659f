"""What a run's own lines tell of the seconds of its engines and learners, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.frozen_config import write_config
from hpc_grpo.run.paths import RunDir
from hpc_grpo.simulate.measured import measured_steps, read_measurements
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
