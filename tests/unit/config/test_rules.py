"""Every rule across fields: what breaks it, and that the message gives the values and the way out."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_grpo.config import rules
from hpc_grpo.config.rules import check_rules
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config

EVAL = {"path": "eval.jsonl"}
MATH = {"name": "math"}
GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}


def test_the_defaults_break_no_rule() -> None:
    check_rules(minimal_config())


@pytest.mark.parametrize("name", ["no_such_module:reward", "gone/file.py:reward"])
def test_a_reward_of_the_users_own_is_left_to_the_job(name: str) -> None:
    check_rules(minimal_config(rewards=[{"name": name}]))


def test_sft_has_no_rewards_to_check() -> None:
    check_rules(minimal_config(task="sft", rewards=[{"name": "corectness"}]))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"run": {"name": ""}}, "run.name = ''"),
        ({"run": {"name": ".."}}, "one folder name"),
        ({"run": {"name": "a/b"}}, "without '/'"),
        ({"run": {"name": "x" * 201}}, "at most 200 bytes"),
        ({"train": {"total_steps": None}}, "None is set. Set one, such as train.total_epochs=1."),
        ({"train": {"total_steps": 1, "total_epochs": 2}}, "Set: train.total_steps, train.total_epochs"),
        (
            {"rollout": {"max_policy_lag": 3}, "train": {"num_minibatches": 2}},
            "max_policy_lag = 3 counts optimizer steps and must be a multiple of train.num_minibatches = 2",
        ),
        (
            {"rollout": {"prompts_per_step": 4}, "train": {"num_minibatches": 5}},
            "train.num_minibatches = 5 exceeds rollout.prompts_per_step = 4",
        ),
        (
            {"rewards": [{"name": "strict_format"}, {"name": "corectness"}]},
            "Reward 'corectness' does not exist; did you mean 'correctness'? Built in: ",
        ),
        ({"rewards": [{"name": "mine.f"}]}, "Or name your own: module:function or path/to/file.py:function."),
        (
            {"task": "ppo", "launch": {"num_nodes": 4, "min_nodes": 3}},
            "launch.min_nodes = 3 is below launch.num_nodes = 4. A run with a critic",
        ),
        (
            {"engine": {"vllm": GUESSES}, "model": {"device": "cpu"}},
            "engine.vllm.speculative_config needs engines on GPUs",
        ),
        (
            {"engine": {"vllm": {"async_scheduling": True}}, "model": {"device": "cpu"}},
            "engine.vllm.async_scheduling = true needs engines on GPUs",
        ),
        (
            {"task": "sft", "train": {"router_replay": True}},
            "train.router_replay = true, but task sft has no engines that choose experts. Set it to false.",
        ),
        (
            {"train": {"router_replay": True}, "engine": {"vllm": {"enable_prefix_caching": False}}},
            "engine.vllm.enable_prefix_caching must be true on GPU and false on CPU with train.router_replay = true",
        ),
        (
            {
                "train": {"router_replay": True},
                "engine": {"vllm": {"enable_prefix_caching": True}},
                "model": {"device": "cpu"},
            },
            "engine.vllm.enable_prefix_caching must be true on GPU and false on CPU with train.router_replay = true",
        ),
        (
            {"engine": {"vllm": {"long_prefill_token_threshold": 64}}, "model": {"device": "cpu"}},
            "engine.vllm.long_prefill_token_threshold = 64 splits prompts, which engines on CPU must not",
        ),
        (
            {"train": {"router_replay": True}, "engine": {"tensor_parallel": 2}, "model": {"device": "cpu"}},
            "train.router_replay = true needs engine.tensor_parallel = 1 on CPU, not 2",
        ),
        (
            {"engine": {"vllm": {"async_scheduling": True, **GUESSES}}},
            "engine.vllm.async_scheduling = true and engine.vllm.speculative_config exclude each other",
        ),
        (
            {"data": {"train": EVAL, "curriculum": {"hard_to": 1.0}}},
            "data.curriculum.hard_to = 1 must be less than data.curriculum.easy_from = 1",
        ),
        (
            {"data": {"train": EVAL, "curriculum": {"difficulty_epochs": 2.0}}},
            "data.curriculum.difficulty_epochs = 2 has no effect without data.curriculum.difficulty_field",
        ),
        ({"task": "sft", "data": {"train": EVAL, "curriculum": {}}}, "task sft has no rollouts to judge prompts by"),
        (
            {
                "task": {"name": "distill", "args": {"teacher": "t"}},
                "rewards": [],
                "data": {"train": EVAL, "curriculum": {}},
            },
            "data.curriculum judges prompts by rewards, and data.train has no rewards.",
        ),
        ({"eval": {"every": 5}}, "data.eval is not"),
        (
            {"data": {"train": {"mix": [{"path": "a", "weight": 1}, {"path": "b"}]}}},
            "data.train.mix.0 has a weight, so each source of the mix needs a weight. Give data.train.mix.1 a weight.",
        ),
        (
            {"data": {"train": {"mix": [{"path": "a", "weight": 1, "count": 2}]}}},
            "data.train.mix.0: weight and count exclude each other",
        ),
        (
            {"data": {"train": EVAL, "eval": {"mix": [{"path": "a", "count": 3}]}}},
            "data.eval.mix.0: weight and count are for training",
        ),
        ({"data": {"train": EVAL, "eval": EVAL, "held_out": 0.1}}, "data.eval and data.held_out exclude"),
        (
            {"data": {"train": {"mix": [{"path": "a", "rewards": [{"name": "mth"}]}]}}},
            "Reward 'mth' does not exist; did you mean 'math'?",
        ),
        ({"rewards": [{"name": "accuracy_reward"}]}, "'accuracy_reward' does not exist; did you mean 'math'? Built in"),
        ({"eval": {"every": 5}, "task": "sft", "data": {"train": {"path": "d"}, "eval": EVAL}}, "task sft"),
        ({"data": {"train": EVAL, "eval_sets": {"a/b": EVAL}}}, "data.eval_sets has 'a/b': the name of a set"),
        (
            {"train": {"on_step": "early_stopping"}},
            "train.on_step.name = 'early_stopping': there are no built-in callbacks. Name your function: ",
        ),
        ({"eval": {"metrics": ["majority"]}}, "eval.metrics has 'majority': there are no built-in eval metrics."),
        (
            {"eval": {"every": 5, "reward": "other"}, "data": {"train": EVAL, "eval": EVAL}},
            "eval.reward = 'other' must be one of rewards: correctness",
        ),
        (
            {"eval": {"every": 5, "reward": "mth"}, "data": {"train": EVAL, "eval": {**EVAL, "rewards": [MATH]}}},
            "eval.reward = 'mth' must be one of rewards: math",
        ),
        (
            {
                "task": {"name": "distill", "args": {"teacher": "t"}},
                "rewards": [],
                "eval": {"every": 5},
                "data": {"eval": EVAL},
            },
            "eval.every is set, but rewards is empty.",
        ),
        (
            {"train": {"max_tokens_per_microbatch": 700}},
            "train.max_tokens_per_microbatch = 700 must hold the longest sequence: data.max_prompt_tokens + "
            "rollout.max_new_tokens = ",
        ),
        (
            {"environment": {"name": "guess.py:G", "max_tokens": 9000}, "train": {"max_tokens_per_microbatch": 700}},
            "must hold the longest sequence: data.max_prompt_tokens + environment.max_tokens = ",
        ),
        (
            {
                "data": {"train": {"path": "d", "environment": "guess.py:G"}, "eval": EVAL},
                "train": {"max_tokens_per_microbatch": 700},
            },
            "data.max_prompt_tokens + data.train.environment.max_tokens = ",
        ),
        (
            {"train": {"share_prompts": True, "attention": "flash_attention_2"}},
            "train.share_prompts = true needs train.attention = sdpa or varlen",
        ),
        (
            {"train": {"sequence_parallel": 4}, "placement": {"learners_per_node": 3}, "launch": {"num_nodes": 2}},
            "train.sequence_parallel = 4 must divide the learners of the run. launch.num_nodes = 2 and "
            "placement.learners_per_node = 3 give 6. Set it to 1, 2, 3, 6, or",
        ),
        (
            {"train": {"sequence_parallel": 2}, "launch": {"num_nodes": 2, "min_nodes": 1}},
            "train.sequence_parallel = 2 must divide placement.learners_per_node = 1, because with launch.min_nodes",
        ),
        (
            {
                "train": {"sequence_parallel": 2, "attention": "flash_attention_2"},
                "placement": {"learners_per_node": 2},
            },
            "train.sequence_parallel = 2 needs train.attention = sdpa or varlen",
        ),
        (
            {"rollout": {"min_new_tokens": 30, "max_new_tokens": 20}},
            "rollout.min_new_tokens = 30 exceeds rollout.max_new_tokens = 20",
        ),
        (
            {"rollout": {"min_new_tokens": 8}},
            "rollout.min_new_tokens = 8: engines renormalise over the tokens that do not end a completion and the "
            "learner does not. The importance weights of loss.correction = truncated would be wrong. Set "
            "rollout.min_new_tokens=0, or loss.correction=none.",
        ),
        (
            {"rollout": {"top_p": 0.9}},
            "rollout.top_p = 0.9: engines renormalise over the nucleus and the learner does not",
        ),
        (
            {"engine": {"vllm": {"max_num_batched_tokens": 255}}},
            "engine.vllm.max_num_batched_tokens = 255 must be at least engine.vllm.max_num_seqs = 256",
        ),
        (
            {"train": {"attention": "varlen"}, "model": {"device": "cpu"}},
            "train.attention = varlen needs a GPU",
        ),
        (
            {"train": {"attention": "flash_attention_2"}, "model": {"dtype": "float32"}},
            "flash_attention_2 computes only in 16 bits; with model.dtype = float32 choose sdpa",
        ),
    ],
)
def test_a_broken_rule_is_an_error_with_the_values_and_the_fix(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_rules(minimal_config(**sections))
    assert words in str(caught.value)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"total_steps": None, "total_episodes": 10}},
        {"rollout": {"max_policy_lag": 4}, "train": {"num_minibatches": 2}},
        {"task": {"name": "sft", "args": {"batch_size": 4}}, "train": {"num_minibatches": 4}},
        {"task": "sft", "train": {"max_tokens_per_microbatch": 1}},
        {"eval": {"every": 5, "num_samples": 2}, "data": {"train": EVAL, "eval": EVAL}},
        {"eval": {"every": 5}, "data": {"train": EVAL, "eval": EVAL}, "rewards": [{"name": "gsm8k"}]},
        {"train": {"max_tokens_per_microbatch": 768}},
        {"rollout": {"min_new_tokens": 20, "max_new_tokens": 20}, "loss": {"correction": "none"}},
        {"engine": {"vllm": {"max_num_batched_tokens": 256}}},
        {"task": "sft", "engine": {"vllm": {"max_num_batched_tokens": 1}}},
    ],
)
def test_a_value_at_the_edge_of_a_rule_passes(sections: dict[str, Any]) -> None:
    check_rules(minimal_config(**sections))


def test_checking_a_config_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom hpc_grpo.config import load_config\nload_config('local/debug', ['loss.kl.coef=0.1']).needs\n"
        "print(sorted(set(sys.modules) & {'torch', 'numpy', 'ray', 'transformers'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


ARGUMENTS = "x = 1\n\nclass EngineArgs:\n    block_size: int = 1\n    def go(self): ...\n"


@pytest.mark.parametrize(
    ("source", "launch", "error"),
    [
        (ARGUMENTS, {}, "blok_size: vLLM has no such argument; did you mean 'block_size'? Usual arguments: max_num_"),
        (ARGUMENTS, {"python": "/opt/other/bin/python"}, None),
        (ARGUMENTS, {"container": {"image": "hpc-grpo"}}, None),
        ("", {}, None),
        (None, {}, None),
    ],
)
def test_an_argument_that_the_jobs_vllm_lacks_is_refused_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None, launch: dict[str, Any], error: str | None
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "arg_utils.py").write_text(source or "")
    found = None if source is None else SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(rules, "find_spec", lambda _name: found)
    check_rules(minimal_config(engine={"vllm": {"block_size": 16}}, launch=launch))
    config = minimal_config(engine={"vllm": {"blok_size": 16}}, launch=launch)
    with nullcontext() if error is None else pytest.raises(ConfigError, match=re.escape(error)):
        check_rules(config)


@pytest.mark.parametrize("source", [{"rewards": [MATH]}, {"environment": {"name": "guess.py:G"}}])
def test_what_decides_in_an_eval_may_be_of_one_of_its_sources_alone(source: dict[str, Any]) -> None:
    """Sources without that reward are judged by their first one."""
    decides = "math" if "rewards" in source else "environment"
    data = {"train": EVAL, "eval": {"mix": [{**EVAL, **source}, EVAL]}}
    check_rules(minimal_config(eval={"every": 5, "reward": decides}, data=data))
