"""The options that vLLM is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.engine.vllm import engine_options, sampling_params
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config

GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}


def test_prompts_are_never_cut_on_cpu() -> None:
    """The generators of requests on CPU cannot be turned back, as vLLM does where it cut a prompt."""
    options = {on_gpu: engine_options(minimal_config(), on_gpu=on_gpu) for on_gpu in (True, False)}
    chosen = {
        on_gpu: (each["enable_chunked_prefill"], each["max_num_batched_tokens"]) for on_gpu, each in options.items()
    }
    assert chosen == {True: (None, 8192), False: (False, 2048)}


@pytest.mark.parametrize(("given", "expected"), [(None, "float32"), ("bfloat16", "bfloat16")])
def test_an_engine_has_the_precision_of_the_learner_unless_told(given: str | None, expected: str) -> None:
    config = minimal_config(model={"dtype": "float32"}, engine={"dtype": given})
    assert engine_options(config, on_gpu=True)["dtype"] == expected


@pytest.mark.parametrize("head_dtype", ["float32", "model"])
def test_an_engine_computes_logits_in_the_precision_of_the_learner(head_dtype: str) -> None:
    options = engine_options(minimal_config(model={"head_dtype": head_dtype}), on_gpu=True)
    assert options["hf_overrides"] == {"head_dtype": head_dtype}


@pytest.mark.parametrize("on_gpu", [True, False])
def test_an_engine_runs_no_code_of_a_models_folder(on_gpu: bool) -> None:
    assert engine_options(minimal_config(), on_gpu=on_gpu)["trust_remote_code"] is False


def test_memory_that_can_be_given_back_is_asked_for_on_gpus_that_are_shared_alone() -> None:
    shared, own = minimal_config(placement={"colocate": True}), minimal_config()
    assert engine_options(shared, on_gpu=True)["enable_sleep_mode"] is True
    assert "enable_sleep_mode" not in engine_options(shared, on_gpu=False)  # vLLM's build for CPUs refuses it
    assert "enable_sleep_mode" not in engine_options(own, on_gpu=True)


def test_tokens_are_guessed_where_the_config_says_so_and_on_gpus_alone() -> None:
    config = minimal_config(engine={"vllm": GUESSES, "max_num_seqs": 4096})
    options = engine_options(config, on_gpu=True)
    assert options["speculative_config"]["method"] == "ngram"
    assert options["speculative_config"]["num_speculative_tokens"] == 4
    assert options["max_num_batched_tokens"] == 4096 * 5, "a step takes what is guessed of every request"
    assert "speculative_config" not in engine_options(minimal_config(), on_gpu=True)
    with pytest.raises(ConfigError, match="Set it to null"):
        engine_options(config, on_gpu=False)


@pytest.mark.parametrize(
    ("engine", "on_gpu", "expected"),
    [
        ({}, True, True),
        ({}, False, False),
        ({"vllm": {"async_scheduling": False}}, True, False),
        ({"vllm": {"async_scheduling": True}}, True, True),
        ({"vllm": GUESSES}, True, False),
    ],
)
def test_a_step_is_scheduled_ahead_on_gpus_where_vllm_can(engine: dict[str, Any], on_gpu: bool, expected: bool) -> None:
    assert engine_options(minimal_config(engine=engine), on_gpu=on_gpu)["async_scheduling"] is expected


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
