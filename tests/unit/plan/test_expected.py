"""A step's expected time, by hand."""

from __future__ import annotations

import pytest

from hpc_grpo.plan.expected import ExpectedStep, expected_step
from hpc_grpo.plan.step import num_steps
from tests.unit.plan.plan_configs import plan_shipped_7b

P = 7_615_616_512
"""Parameters of 7B. Its config has two learners and two engines a node, and samples a step ahead."""
SEQUENCES, LENGTH, NEW = 1024, 5120, 4096
AVERAGE = LENGTH - NEW / 2
"""Tokens of a sequence, over the time in which it is sampled."""


def expected(num_nodes: int, *overrides: str, size: str = "7B") -> ExpectedStep:
    step = expected_step(plan_shipped_7b(size, num_nodes, *overrides))
    assert step is not None
    return step


def test_training_takes_its_arithmetic_where_that_is_longer_than_its_communication() -> None:
    assert expected(4).train_s == pytest.approx(8 * P * SEQUENCES * LENGTH / (8 * 0.4 * 989e12))


def test_sampling_reads_weights_and_cache_for_every_token_of_a_batch() -> None:
    step = expected(4)  # 128 sequences for each of 8 engines, at once
    read = 2 * P + 128 * AVERAGE * 57_344
    assert step.sample_s == pytest.approx(NEW * read / (0.6 * 4.0e12))


def test_engines_in_float32_read_four_bytes_of_each_weight() -> None:
    step = expected(4, "engine.dtype=float32", "engine.max_num_seqs=64")
    read = 4 * P + 64 * AVERAGE * 2 * 57_344
    assert step.sample_s == pytest.approx(2 * NEW * read / (0.6 * 4.0e12))


def test_the_cpus_share_of_a_decode_step_comes_on_top_or_hides_behind_the_gpu() -> None:
    """A step of 0.5B on few sequences is the CPU's alone; one of 7B hides it."""
    in_turn, few = "engine.vllm.async_scheduling=false", "rollout.prompts_per_step=8"
    assert expected(4, in_turn).sample_s == pytest.approx(expected(4).sample_s + NEW * (0.002 + 128 * 12e-6))
    assert (
        expected(4, "engine.vllm.speculative_config={method: ngram, num_speculative_tokens: 4}").sample_s
        == expected(4, in_turn).sample_s
    )
    assert expected(4, few, size="0.5B").sample_s == pytest.approx(NEW * (0.002 + 16 * 12e-6))


@pytest.mark.parametrize("lag", [0, 1])
def test_at_worst_a_step_samples_as_often_as_its_bound_allows_and_trains_once(lag: int) -> None:
    bound, plain = (f"rollout.max_policy_lag={lag}", "rollout.dynamic_sampling=3"), expected(4)
    step = expected(4, *bound)
    assert (step.sample_s, step.train_s) == (plain.sample_s, plain.train_s)
    both = (3 * plain.sample_s, plain.train_s)
    assert step.at_worst.step_s == (max(both) if lag else sum(both))


def test_the_last_batch_of_an_engine_holds_the_rest() -> None:
    reads = [2 * P + running * AVERAGE * 57_344 for running in (96, 96, 64)]
    step = expected(2, "engine.max_num_seqs=96")
    assert step.sample_s == pytest.approx(NEW * sum(read / (0.6 * 4.0e12) for read in reads))


def test_sequences_for_which_the_cache_is_too_small_at_their_end_need_no_second_round() -> None:
    """vLLM starts all of an engine's 256, whose cache holds 250 of full length and 417 of average length."""
    cache = plan_shipped_7b("7B", 2).kv_cache
    assert cache is not None
    assert (cache.num_sequences, cache.num_sequences_of(AVERAGE)) == (250, 417)
    read = 2 * P + 256 * AVERAGE * 57_344
    assert expected(2).sample_s == pytest.approx(NEW * read / (0.6 * 4.0e12))


def test_sequences_that_the_cache_does_not_hold_take_turns() -> None:
    small = ("engine.kv_cache_gib=20.5", "engine.max_num_seqs=512")
    cache = plan_shipped_7b("7B", 2, *small).kv_cache
    assert cache is not None
    held = cache.num_sequences_of(AVERAGE)
    assert 100 < held < 128
    read = 2 * P + held * AVERAGE * 57_344
    assert expected(2, *small).sample_s == pytest.approx(NEW * 256 / held * read / (0.6 * 4.0e12))


def test_engines_of_two_gpus_share_the_reads_and_pay_two_all_reduces_a_layer() -> None:
    step = expected(4, "engine.tensor_parallel=2", "engine.engines_per_node=1")
    read_s = (P + 256 * AVERAGE * 57_344 / 2) / (0.6 * 4.0e12)
    sent_s = 256 * 3584 * 2 / (0.8 * 150e9)
    assert step.sample_s == pytest.approx(NEW * (read_s + 56 * (10e-6 + sent_s)))


@pytest.mark.parametrize(("stage", "in_microbatch", "in_step"), [(1, 0, 10), (2, 8, 2), (3, 8, 0)])
def test_learners_wait_for_gradients_where_the_network_is_slower_than_the_arithmetic(
    stage: int, in_microbatch: int, in_step: int
) -> None:
    small = ("train.max_tokens_per_microbatch=5120", "train.gradient_checkpointing=false")
    step = expected(4, f"train.zero_stage={stage}", *small)
    byte_s = P * 7 / 8 / (0.8 * 25e9 * 2)  # through the interfaces of a node's two learners
    arithmetic_s = 6 * P * SEQUENCES * LENGTH / (8 * 0.4 * 989e12)
    assert step.train_s == pytest.approx(max(arithmetic_s, 128 * in_microbatch * byte_s) + in_step * byte_s)


def test_an_offloaded_optimizer_costs_its_update_and_the_gradients_way() -> None:
    kept, offloaded = expected(4), expected(4, "train.offload_optimizer=cpu")
    assert offloaded.train_s == pytest.approx(kept.train_s + 40 * P / 8 / (0.3 * 500e9))


def test_without_checkpointing_training_saves_the_second_forward_pass() -> None:
    saved, plain = (expected(4, f"train.gradient_checkpointing={chosen}") for chosen in ("true", "false"))
    assert saved.train_s == pytest.approx(plain.train_s * 8 / 6)


@pytest.mark.parametrize(
    ("override", "flops"),
    [("loss.kl.coef=0.1", 10), ("train.num_minibatches=2", 9), ("loss.correction=m2po", 10)],
)
def test_a_reference_and_proximal_logprobs_are_forward_passes_more(override: str, flops: int) -> None:
    in_turn = "rollout.max_policy_lag=0"
    assert expected(4, in_turn, override).train_s == pytest.approx(expected(4, in_turn).train_s * flops / 8)


def test_a_step_that_samples_ahead_takes_the_longer_of_the_two_and_one_in_turn_their_sum() -> None:
    ahead, in_turn = expected(4), expected(4, "rollout.max_policy_lag=0")
    assert ahead.step_s == max(ahead.sample_s, ahead.train_s)
    assert in_turn.step_s == in_turn.sample_s + in_turn.train_s


def test_gpu_hours_count_the_gpus_that_are_used() -> None:
    step, steps = expected(4), num_steps(plan_shipped_7b("7B", 4))
    assert steps is not None
    assert step.num_gpus == 16
    assert step.gpu_hours(steps) == pytest.approx(steps * step.step_s * 16 / 3600)


def test_twice_the_nodes_halve_training_and_shorten_sampling() -> None:
    few, many = expected(4), expected(8)
    assert many.train_s == pytest.approx(few.train_s / 2)
    assert many.sample_s < few.sample_s


def test_nothing_is_expected_of_cpus() -> None:
    assert expected_step(plan_shipped_7b("7B", 4, "model.device=cpu")) is None


def test_a_critic_is_trained_as_long_as_the_policy() -> None:
    assert expected(4, "task=ppo").train_s == pytest.approx(2 * expected(4).train_s)
