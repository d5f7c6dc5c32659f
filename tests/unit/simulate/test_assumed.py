"""The seconds that are expected of a step, by hand, and what a tail of long completions costs."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hpc_grpo.plan.fit import Plan, replanned
from hpc_grpo.simulate import assumed
from hpc_grpo.simulate.assumed import longest_step, simulated
from hpc_grpo.simulate.cluster import Forecast
from tests.unit.plan.plan_configs import plan_shipped_7b

P = 7_615_616_512
"""Parameters of 7B. Its config has two learners and two engines a node, and samples a step ahead."""
A = 40_370_176
"""Parameters of its adapter of rank 16."""
SEQUENCES, LENGTH, NEW = 1024, 5120, 4096
AVERAGE = LENGTH - NEW / 2
"""Tokens of a sequence, over the time in which it is sampled."""


class Expected(NamedTuple):
    sample_s: float
    train_s: float


def expected(num_nodes: int, *overrides: str, size: str = "7B") -> Expected:
    step = longest_step(plan_shipped_7b(size, num_nodes, *overrides))
    assert step is not None
    return Expected(*step)


def simulated_at(plan: Plan, lag: int) -> Forecast:
    found = simulated(plan, lag)
    assert found is not None
    return found


def test_training_takes_its_arithmetic_where_that_is_longer_than_its_communication() -> None:
    assert expected(4).train_s == pytest.approx(8 * P * SEQUENCES * LENGTH / (8 * 0.4 * 989e12))


def test_sampling_reads_weights_and_cache_for_every_token_of_a_batch() -> None:
    step = expected(4)  # 128 sequences for each of 8 engines, at once
    read = 2 * P + 128 * AVERAGE * 57_344
    assert step.sample_s == pytest.approx(NEW * read / (0.6 * 4.0e12))


def test_engines_in_float32_read_four_bytes_of_each_weight() -> None:
    step = expected(4, "engine.dtype=float32", "engine.vllm.max_num_seqs=64")
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


def test_the_last_batch_of_an_engine_holds_the_rest() -> None:
    reads = [2 * P + running * AVERAGE * 57_344 for running in (96, 96, 64)]
    step = expected(2, "engine.vllm.max_num_seqs=96")
    assert step.sample_s == pytest.approx(NEW * sum(read / (0.6 * 4.0e12) for read in reads))


def test_sequences_for_which_the_cache_is_too_small_at_their_end_need_no_second_round() -> None:
    """vLLM starts all of an engine's 256, whose cache holds 250 of full length and 417 of average length."""
    cache = plan_shipped_7b("7B", 2).kv_cache
    assert cache is not None
    assert (cache.num_sequences, cache.num_sequences_of(AVERAGE)) == (250, 417)
    read = 2 * P + 256 * AVERAGE * 57_344
    assert expected(2).sample_s == pytest.approx(NEW * read / (0.6 * 4.0e12))


def test_sequences_that_the_cache_does_not_hold_take_turns() -> None:
    small = ("engine.kv_cache_gib=20.5", "engine.vllm.max_num_seqs=512")
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


@pytest.mark.parametrize(
    ("stage", "in_microbatch", "in_step"), [(1, 0, 10 * A), (2, 8 * A, 2 * A), (3, 4 * P + 8 * A, 0)]
)
def test_lora_has_gradients_of_its_adapter_alone(stage: int, in_microbatch: int, in_step: int) -> None:
    """Stage 3 gathers the base model's weights too, twice per microbatch."""
    small = ("train.max_tokens_per_microbatch=5120", "train.gradient_checkpointing=false")
    step = expected(4, "lora.rank=16", f"train.zero_stage={stage}", *small)
    byte_s = 7 / 8 / (0.8 * 25e9 * 2)
    arithmetic_s = (4 * P + 6 * A) * SEQUENCES * LENGTH / (8 * 0.4 * 989e12)
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


def test_nothing_is_expected_of_cpus() -> None:
    plan = plan_shipped_7b("7B", 4, "model.device=cpu")
    assert longest_step(plan) is None
    assert simulated(plan, 0) is None


def test_a_critic_is_trained_as_long_as_the_policy() -> None:
    assert expected(4, "task=ppo").train_s == pytest.approx(2 * expected(4).train_s)


@pytest.mark.parametrize(("size", "num_nodes"), [("0.5B", 2), ("7B", 2), ("7B", 8), ("14B", 4)])
def test_a_lag_hides_some_of_the_tail(size: str, num_nodes: int) -> None:
    in_turn, ahead = (simulated_at(plan_shipped_7b(size, num_nodes), lag) for lag in (0, 1))
    assert ahead.step_s < 0.8 * in_turn.step_s
    assert ahead.engines_idle < in_turn.engines_idle
    assert ahead.learners_idle < in_turn.learners_idle


def test_a_longer_lag_hides_what_one_step_ahead_does_not() -> None:
    """Where sampling is the longer half, a step waits for its last completion, unless the next ones are under way."""
    plan = plan_shipped_7b("0.5B", 2)
    assert simulated_at(plan, 4).step_s < 0.7 * simulated_at(plan, 1).step_s


def test_at_a_long_lag_a_step_takes_what_learners_take_for_their_share_of_the_mean_length() -> None:
    """Learners set the pace of a 7B: 1,024 prompts of 1,024 tokens, with 1,024 tokens of completions on average."""
    step = simulated_at(plan_shipped_7b("7B", 2), 4)
    assert step.learners_idle < 0.01
    assert step.step_s == pytest.approx(expected(2).train_s * 2048 / 5120, rel=0.02)


def test_of_a_large_step_some_nodes_are_simulated_and_tell_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_shipped_7b("7B", 16, "rollout.prompts_per_step=512")
    parts = [simulated_at(plan, lag) for lag in range(3)]
    monkeypatch.setattr(assumed, "MOST_ROLLOUTS", 8192)
    for lag, part in enumerate(parts):
        whole = simulated_at(plan, lag)
        assert part.step_s == pytest.approx(whole.step_s, rel=0.05)
        assert part.engines_idle == pytest.approx(whole.engines_idle, abs=0.03)


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_a_few_steps_tell_as_much_as_many(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that one step leaves half empty sample several at once, and those end together: bursts of lag + 1."""
    plan = plan_shipped_7b("0.5B", 8)
    few = simulated_at(plan, lag)
    monkeypatch.setattr(assumed, "_ROLLOUTS", 60 * 1024)
    many = simulated_at(plan, lag)
    assert few.step_s == pytest.approx(many.step_s, rel=0.05)
    assert few.learners_idle == pytest.approx(many.learners_idle, abs=0.03)


def test_no_advantage_or_algorithm_of_a_users_is_run() -> None:
    plan = plan_shipped_7b("7B", 2)
    theirs = replanned(plan, (("loss.advantage", "nowhere:gone"),), 2)
    assert simulated(theirs, 1) == simulated(plan, 1)
