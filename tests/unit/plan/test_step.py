"""What a step is expected to take, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.plan.step import expected_step, num_steps
from tests.unit.plan.plan_configs import plan_7b_config

P = 7_615_616_512
"""Parameters of 7B. Its config has three engines and one learner a node."""


def test_training_is_arithmetic_and_sampling_is_memory() -> None:
    plan = plan_7b_config("7B", 4)
    assert plan.kv_cache is not None
    config = plan.config
    tokens = config.rollout.prompts_per_step * config.rollout.group_size * config.max_model_len
    step = expected_step(plan)
    assert step is not None
    assert step.train_s == pytest.approx(8 * P * tokens / (4 * 0.4 * 989e12))
    per_engine = -(-tokens // config.max_model_len // 12)
    running = min(config.engine.max_num_seqs, plan.kv_cache.num_sequences, per_engine)
    batches = -(-per_engine // running)
    read = 2 * P + running * config.max_model_len / 2 * 57_344
    assert step.sample_s == pytest.approx(batches * config.rollout.max_new_tokens * read / (0.6 * 4.0e12))
    assert step.step_s == step.sample_s + step.train_s
    assert step.num_gpus == 16
    steps = num_steps(plan)
    assert steps is not None
    assert step.gpu_hours(steps) == pytest.approx(steps * step.step_s * 16 / 3600)


def test_without_checkpointing_there_is_no_second_forward_pass() -> None:
    step, plain = (
        expected_step(plan_7b_config("7B", 4, f"train.gradient_checkpointing={chosen}")) for chosen in ("true", "false")
    )
    assert step is not None
    assert plain is not None
    assert step.train_s == pytest.approx(plain.train_s * 8 / 6)


def test_sampling_ahead_costs_the_longer_of_the_two() -> None:
    ahead = expected_step(plan_7b_config("7B", 4, "rollout.max_policy_lag=1"))
    assert ahead is not None
    assert ahead.step_s == max(ahead.sample_s, ahead.train_s)


def test_more_nodes_divide_both() -> None:
    few, many = expected_step(plan_7b_config("7B", 4)), expected_step(plan_7b_config("7B", 8))
    assert few is not None
    assert many is not None
    assert many.train_s == pytest.approx(few.train_s / 2)
    assert many.sample_s < few.sample_s


def test_nothing_is_expected_of_cpus_and_of_runs_of_unknown_length() -> None:
    assert expected_step(plan_7b_config("7B", 4, "model.device=cpu")) is None
    assert num_steps(plan_7b_config("7B", 4, "train.total_episodes=null", "train.total_epochs=1")) is None


def test_the_epochs_of_a_file_are_counted(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    epochs = ["train.total_episodes=null", "train.total_epochs=2"]
    data = [f"data.train.path={rows}", "data.train.prompt_field=question", "data.train.answer_field=answer"]
    rows.write_text('{"question": "q", "answer": "a"}\n' * 130)
    plan = plan_7b_config("7B", 4, *epochs, *data, "rollout.prompts_per_step=64")
    assert num_steps(plan) == 5  # 260 prompts in steps of 64
    rows.write_text("{\n")
    assert num_steps(plan) is None
