"""The options that vLLM is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.engine.sampler import sampling_params
from hpc_grpo.engine.vllm import engine_options
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config

GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}


FLOAT32, COLOCATED = {"model": {"dtype": "float32"}}, {"placement": {"colocate": True}}
REPLAY = {"train": {"router_replay": True}}


@pytest.mark.parametrize(
    ("sections", "on_gpu", "option", "expected"),
    [
        # The generators of requests on CPU cannot be turned back, as vLLM does where it cut a prompt.
        ({}, True, "enable_chunked_prefill", None),
        ({}, True, "max_num_batched_tokens", 8192),
        ({}, False, "enable_chunked_prefill", False),
        ({}, False, "max_num_batched_tokens", 2048),
        ({}, True, "block_size", None),
        ({}, False, "block_size", 32),
        ({"engine": {"vllm": {"block_size": 64}}}, False, "block_size", 64),
        (FLOAT32, True, "dtype", "float32"),
        ({**FLOAT32, "engine": {"dtype": "bfloat16"}}, True, "dtype", "bfloat16"),
        ({"model": {"head_dtype": "float32"}}, True, "hf_overrides", {"head_dtype": "float32"}),
        ({"model": {"head_dtype": "model"}}, True, "hf_overrides", {"head_dtype": "model"}),
        ({}, True, "trust_remote_code", False),
        ({}, False, "trust_remote_code", False),
        (COLOCATED, True, "enable_sleep_mode", True),
        (COLOCATED, False, "enable_sleep_mode", None),  # vLLM's build for CPUs refuses it
        ({}, True, "enable_sleep_mode", None),
        ({}, True, "enable_return_routed_experts", None),
        (REPLAY, True, "enable_return_routed_experts", True),
        (REPLAY, True, "enable_prefix_caching", True),
        (REPLAY, False, "enable_return_routed_experts", None),  # vLLM refuses it on CPU
        (REPLAY, False, "enable_prefix_caching", False),
        ({}, True, "async_scheduling", True),
        ({}, False, "async_scheduling", False),
        ({"engine": {"vllm": {"async_scheduling": False}}}, True, "async_scheduling", False),
        ({"engine": {"vllm": {"async_scheduling": True}}}, True, "async_scheduling", True),
        ({"engine": {"vllm": GUESSES}}, True, "async_scheduling", False),
        ({"data": {"images": "image"}}, True, "mm_device_do_normalize", False),
        ({"engine": {"kv_cache_gib": 4}}, True, "kv_cache_memory_bytes", 4 * 2**30),
        ({"engine": {"kv_cache_gib": 4}}, True, "gpu_memory_utilization", 0.01),
    ],
)
def test_an_option_of_vllm_follows_from_config_and_device(
    sections: dict[str, Any], on_gpu: bool, option: str, expected: Any
) -> None:
    assert engine_options(minimal_config(**sections), on_gpu=on_gpu).get(option) == expected


def test_tokens_are_guessed_where_the_config_says_so_and_on_gpus_alone() -> None:
    config = minimal_config(engine={"vllm": {**GUESSES, "max_num_seqs": 4096}})
    options = engine_options(config, on_gpu=True)
    assert options["speculative_config"]["method"] == "ngram"
    assert options["speculative_config"]["num_speculative_tokens"] == 4
    assert options["max_num_batched_tokens"] == 4096 * 5, "a step takes what is guessed of every request"
    assert "speculative_config" not in engine_options(minimal_config(), on_gpu=True)
    with pytest.raises(ConfigError, match="Set it to null"):
        engine_options(config, on_gpu=False)


def test_vllm_is_not_asked_to_schedule_ahead_on_a_machine_without_gpus() -> None:
    with pytest.raises(ConfigError, match=r"engine\.vllm\.async_scheduling = true needs engines on GPUs"):
        engine_options(minimal_config(engine={"vllm": {"async_scheduling": True}}), on_gpu=False)


def test_vllm_writes_traces_only_where_steps_are_to_be_profiled() -> None:
    assert "profiler_config" not in engine_options(minimal_config(), on_gpu=False)
    asked = engine_options(minimal_config(metrics={"profile_steps": [2, 3]}), on_gpu=False)["profiler_config"]
    assert asked["profiler"] == "torch"
    folder = Path(asked["torch_profiler_dir"])
    assert list(folder.iterdir()) == []
    folder.rmdir()


def test_texts_that_end_a_completion_are_looked_for_by_vllm_which_then_has_the_tokenizer() -> None:
    pytest.importorskip("vllm")
    for stop in ([], ["</answer>"]):
        config = minimal_config(rollout={"stop": stop})
        assert engine_options(config, on_gpu=True)["skip_tokenizer_init"] is not bool(stop)
        params = sampling_params(config.rollout.sampling(1.0, 1.0), 0, [2])
        assert (params.stop, params.detokenize) == (stop, bool(stop))
