"""A real engine with more prompts than it can take at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.demo.model import ModelSize, write_model
from tests.integration.crowded_engine import NUM_PROMPTS
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import engine_report, tiny_config

pytestmark = pytest.mark.integration

PROMPT_TOKENS, NEW_TOKENS, GROUP_SIZE = 370, 48, 4
SIZE = ModelSize(hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=96, max_tokens=512)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine whose KV cache holds a sixth of the requests it is given."""
    workspace = tmp_path_factory.mktemp("engine")
    write_model(workspace / "model", SIZE, seed=0)
    return tiny_config(
        workspace,
        "crowded",
        "model",
        data={"max_prompt_tokens": PROMPT_TOKENS},
        rollout={"max_new_tokens": NEW_TOKENS, "group_size": GROUP_SIZE},
        engine={"vllm": {"max_num_seqs": 64, "max_num_batched_tokens": 512}, "kv_cache_gib": 0.002},
    )


@pytest.fixture(scope="module")
def crowded(config: Path) -> dict[str, Any]:
    return engine_report("crowded_engine", config)


def test_more_prompt_tokens_than_a_step_takes_are_all_sampled(crowded: dict[str, Any]) -> None:
    assert len(crowded["crowd"]) == NUM_PROMPTS
    assert all(len(group) == GROUP_SIZE for group in crowded["crowd"])
    assert crowded["preemptions"] > 0
    assert crowded["logprob_difference"] < TOLERANCE


@pytest.mark.parametrize("otherwise", ["interrupted", "backwards", "alone"])
def test_completions_depend_on_prompt_and_seed_alone(crowded: dict[str, Any], otherwise: str) -> None:
    """Not on what else is in flight, its order, preemptions, or publishes that drop the cache."""
    assert crowded["crowd"] == crowded[otherwise]


def test_vllm_that_schedules_ahead_samples_the_same_and_every_token_is_of_the_version_it_counts_as(
    crowded: dict[str, Any],
) -> None:
    """vLLM's own scheduler and queue of GPUs, on CPU; weights change three times under requests in flight."""
    ahead = crowded["ahead"]
    assert ahead["crowd"] == crowded["crowd"]
    assert (ahead["most_in_flight"], ahead["versions"]) == (1, [0, 1, 2, 3])
    assert ahead["logprob_difference"] < TOLERANCE


def test_an_engine_that_refused_prompts_goes_on(crowded: dict[str, Any]) -> None:
    empty, unknown = crowded["refused"]
    assert "ordinal 0" in empty
    assert "empty" in empty
    assert "token id 999 is outside the model's vocabulary of 258" in unknown
    assert crowded["after_refusals"] == crowded["crowd"][:1]


def test_logprobs_before_min_new_tokens_are_renormalised_without_the_end(crowded: dict[str, Any]) -> None:
    """Learners do not do that: the configuration refuses a correction beside rollout.min_new_tokens."""
    assert {len(tokens) for (group,) in [crowded["endless"]] for tokens in group} == {NEW_TOKENS}
    assert crowded["endless_difference_without_end"] < TOLERANCE < crowded["endless_difference"]


def test_an_engine_that_slept_samples_as_before(crowded: dict[str, Any]) -> None:
    """Its own weights are still there: vLLM's build for CPUs gives no memory back, and does all else of a sleep."""
    assert crowded["sleeps"] is True
    assert crowded["after_sleep"] == crowded["crowd"][:1]
