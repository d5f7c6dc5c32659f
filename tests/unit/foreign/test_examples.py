"""The example files that AReaL, verl, open-instruct and open-r1 ship become configs that load, with these values."""

from __future__ import annotations

import sys
import tempfile
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.cli.foreign import table_text
from hpc_grpo.config import Config
from hpc_grpo.config.load import load_values
from hpc_grpo.config.run import Every
from hpc_grpo.foreign import reading
from hpc_grpo.foreign.systems import SYSTEMS
from hpc_grpo.foreign.table import Kind, Translation
from tests.unit.foreign.examples import AREAL, OPEN_INSTRUCT, TRL, VERL, Example

ALL: dict[str, tuple[str, Example]] = {
    f"{title}/{name}": (system, example)
    for title, system, examples in (
        ("areal", "areal", AREAL),
        ("verl", "verl", VERL),
        ("open-instruct", "open_instruct", OPEN_INSTRUCT),
        ("trl", "trl", TRL),
    )
    for name, example in examples.items()
}

EXPECTED: dict[str, dict[str, Any]] = {
    "areal/boba": {
        "run.name": "boba_ppo_vllm-trial0",
        "run.root": Path("/tmp/areal/experiments"),
        "model.path": "Qwen/Qwen2.5-1.5B-Instruct",
        "launch.num_nodes": 2,
        "placement.learners_per_node": 4,
        "engine.engines_per_node": 2,
        "engine.tensor_parallel": 2,
        "data.max_prompt_tokens": 2048,
        "rollout.prompts_per_step": 512,
        "rollout.group_size": 16,
        "rollout.max_new_tokens": 30720,
        "rollout.max_policy_lag": 16,  # 4 batches of 4 minibatches
        "train.num_minibatches": 4,
        "train.max_tokens_per_microbatch": 32768,
        "train.lr": 1e-5,
        "train.adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        "train.total_epochs": 10,
        "train.warmup_steps": 0,
        "loss.name": "decoupled_ppo",
        "loss.clip_low": 0.4,
        "loss.clip_high": 0.4,
        "loss.correction.name": "icepop",
        "loss.correction.args.cap": 5.0,
        "loss.proximal": "recomputed",
        "loss.kl.coef": 0.0,
        "loss.advantage.name": "group",
        "checkpoint.export_every": Every(epochs=1),
        "checkpoint.every": Every(epochs=1, seconds=3600.0),
        "eval.every": None,
        "metrics.wandb": {"mode": "disabled"},
    },
    "areal/gsm8k": {
        "data.train.subset": "main",
        "data.eval.path": "openai/gsm8k",
        "data.eval.split": "test",
        "data.max_prompt_tokens": 1024,
        "placement.learners_per_node": 4,
        "engine.engines_per_node": 4,
        "rollout.max_policy_lag": 2,
        "train.gradient_checkpointing": False,
        "eval.every": Every(epochs=1),
    },
    "areal/boba-1.0.4": {
        "train.zero_stage": 3,
        "placement.learners_per_node": 4,
        "engine.engines_per_node": 4,
        "rollout.prompts_per_step": 32,
        "rollout.max_policy_lag": 16,
        "loss.name": "decoupled_ppo",
        "loss.correction.name": "icepop",
        "loss.correction.args.low": 0.0,
        "loss.correction.args.cap": 5.0,
        "loss.advantage.args.eps": pytest.approx(1e-6),  # 1e-5 beside rewards that are scaled by 10
        "train.max_tokens_per_microbatch": 32768,
        "engine.vllm": {
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.9,
            "enforce_eager": False,
            "enable_prefix_caching": False,
        },
    },
    "areal/gsm8k-1.0.4": {"data.drop_long_prompts": True, "data.max_prompt_tokens": 1024},
    "areal/gspo-1.0.4": {"loss.name": "gspo", "loss.denominator": "tokens", "loss.correction.args.cap": 5.0},
    "areal/sapo-1.0.4": {
        "loss.name": "sapo",
        "loss.denominator": "tokens",
        "loss.proximal": "engine",
        "loss.correction.name": "none",
    },
    "areal/lora": {
        "loss.advantage.name": "group",
        "loss.advantage.normalize_std": True,
        "engine.vllm": {
            "max_num_seqs": 256,
            "gpu_memory_utilization": 0.9,
            "enforce_eager": True,
            "enable_prefix_caching": False,
        },
    },
    "areal/0.3": {
        "launch.num_nodes": 1,
        "placement.learners_per_node": 4,
        "engine.engines_per_node": 4,
        "rollout.prompts_per_step": 512,
        "rollout.group_size": 16,
        "data.max_prompt_tokens": 1024,
        "train.max_tokens_per_microbatch": 30720,
        "train.total_epochs": 5,
        "checkpoint.export_every": Every(epochs=1),
        "checkpoint.every": Every(seconds=600.0),
        "loss.clip_high": 0.2,
        "rollout.max_policy_lag": 16,
    },
    "verl/qwen2-7b": {
        "run.name": "qwen2_7b_function_rm",
        "data.train.path": "/home/me/data/gsm8k/train.parquet",
        "data.train.messages_field": "prompt",
        "data.train.answer_field": "reward_model.ground_truth",
        "rollout.prompts_per_step": 1024,
        "rollout.group_size": 5,
        "rollout.max_policy_lag": 0,
        "train.num_minibatches": 4,
        "train.max_tokens_per_microbatch": 40 * 1536,
        "train.total_epochs": 15,
        "train.adamw": {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
        "loss.name": "grpo",
        "loss.denominator": "tokens",
        "loss.kl.coef": 0.001,
        "loss.kl.estimator": "k3",
        "loss.kl.where": "loss",
        "loss.args.dual_clip": 3.0,
        "loss.correction.name": "none",
        "placement.colocate": True,
        "placement.learners_per_node": 8,
        "engine.engines_per_node": 8,
        "engine.tensor_parallel": 1,
        "engine.gpu_memory_utilization": 0.6,
        "checkpoint.every": Every(steps=20),
        "eval.every": Every(steps=5),
        "eval.temperature": 0.0,
        "metrics.wandb": {"project": "verl_grpo_example_gsm8k", "mode": "auto"},
    },
    "verl/cispo": {"loss.name": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 0.2, "engine.max_num_seqs": 256},
    "verl/rloo": {"loss.advantage.name": "rloo", "loss.kl.where": "reward", "loss.kl.estimator": "k1"},
    "verl/gspo": {
        "loss.name": "gspo_token",
        "loss.denominator": "sequences",
        "loss.clip_low": 0.0003,
        "train.warmup_steps": 100,
        "rollout.overlong_tokens": None,
        "train.offload_optimizer": "cpu",
    },
    "verl/math": {"loss.kl.coef": 0.0, "data.max_prompt_tokens": 1024, "data.train.path": None},
    "verl/seq_balance": {"train.max_tokens_per_microbatch": 24000},
    "open-instruct/olmo3": {
        "launch.num_nodes": 8,
        "placement.learners_per_node": 1,
        "engine.engines_per_node": 7,
        "rollout.prompts_per_step": 16,
        "rollout.group_size": 16,
        "rollout.max_policy_lag": 4,
        "rollout.mask_truncated": True,
        "train.total_episodes": 512000,
        "train.zero_stage": 3,
        "train.max_tokens_per_microbatch": 32768,
        "loss.advantage.normalize_std": False,
        "loss.clip_high": 0.272,
        "loss.clip_low": 0.2,
        "loss.correction.args.cap": 2.0,
        "loss.kl.coef": 0.0,
        "data.curriculum.easy_from": 9.0,
        "data.train.messages_field": "messages",
        "checkpoint.every": Every(steps=100),
        "eval.every": Every(steps=100),
    },
    "open-instruct/qwen7b": {
        "launch.num_nodes": 2,
        "placement.learners_per_node": 2,
        "engine.engines_per_node": 6,
        "train.schedule": "linear",
        "data.eval.max_items": 16,
        "train.lr": 5e-7,
        "checkpoint.every": Every(steps=200),
        "checkpoint.export_every": Every(steps=40),
    },
    "open-instruct/olmo3-2026": {
        "rollout.dynamic_sampling": 10,
        "rollout.max_policy_lag": 8,
        "data.curriculum.easy_from": 8.75,
        "loss.correction.name": "truncated",
        "loss.correction.args.cap": 2.0,
        "rollout.temperature": 1.0,
        "data.drop_long_prompts": True,
    },
    "open-instruct/qwen3-4b": {"eval.num_samples": 32, "train.zero_stage": 2, "loss.kl.coef": 0.0},
    "open-instruct/gsm8k": {
        "placement.colocate": True,
        "rollout.max_policy_lag": 0,
        "run.name": "test",
        "rollout.dynamic_sampling": 10,
        "eval.num_samples": 4,
    },
    "trl/qwen-1.5b": {
        "run.name": "Qwen2.5-1.5B-Open-R1-GRPO",
        "data.train.subset": "default",
        "rollout.prompts_per_step": 4,  # 16 completions on one process, 4 times, of 16 a prompt
        "rollout.group_size": 16,
        "train.num_minibatches": 1,
        "train.schedule": "cosine",
        "train.attention": "flash_attention_2",
        "loss.name": "grpo",
        "loss.denominator": "tokens",
        "loss.kl.coef": 0.0,
        "loss.correction.name": "sequence_mask",
        "loss.correction.args.cap": 3.0,
        "data.drop_long_prompts": True,
        "model.dtype": "bfloat16",
        "checkpoint.every": Every(epochs=1),
        "checkpoint.keep_last": 1,
    },
    "trl/distill-1.5b": {"rollout.temperature": 0.7, "rollout.max_new_tokens": 2048, "train.schedule": "cosine"},
    "trl/simple-rl": {
        "eval.every": Every(steps=100),
        "eval.reward": "math",
        "data.eval.split": "test",
        "rollout.group_size": 7,
        "rollout.prompts_per_step": 18,
    },
    "trl/zero-7b": {
        "rollout.prompts_per_step": 32,
        "rollout.mask_truncated": True,
        "train.num_minibatches": 8,
        "train.max_grad_norm": 0.2,
        "loss.correction.name": "sequence_mask",
    },
    "trl/gspo": {
        "loss.name": "gspo",
        "loss.denominator": "sequences",
        "rollout.prompts_per_step": 4,
        "train.num_minibatches": 4,
    },
    "trl/dapo": {"rollout.mask_truncated": True, "loss.clip_high": 0.28, "rollout.prompts_per_step": 32},
    "trl/dr-grpo": {"loss.name": "dr_grpo", "loss.denominator": "constant", "loss.advantage.normalize_std": False},
    "trl/intellect-2": {"loss.args.dual_clip": 4.0, "loss.kl.estimator": "unbiased"},
    "trl/cispo": {"loss.clip_high": 4.0, "loss.advantage.name": "group_step_std", "model.head_dtype": "float32"},
    "trl/masked": {"loss.correction.args.low": 0.5, "loss.correction.args.cap": 2.0, "train.schedule": "linear"},
}

REFUSED = {
    "areal/boba": "neither reward_norm nor adv_norm",
    "areal/lora": "set section lora instead",
    "open-instruct/olmo3-2026": "do not divide evenly among 9 nodes",
    "open-instruct/olmo3": "take 72, and 8 nodes of 8 have 64",
    "open-instruct/qwen7b": "a right answer counts only in the right format",
    "trl/zero-7b": "there is no reward soft_format",
}


def keys_of(example: Example) -> dict[str, Any]:
    """The keys of an example by dotted names, its interpolations written out, as `read_nested` gives them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "theirs.yaml"
        file.write_text(yaml.safe_dump(example.keys))
        return reading.read_nested(file, {}, {})


def translated(name: str) -> tuple[Translation, Config]:
    system, example = ALL[name]
    translation = SYSTEMS[system].translated(keys_of(example))
    return translation, load_values(translation.values, [], name)


@pytest.mark.parametrize("name", ALL)
def test_an_example_loads_with_the_values_it_means_and_each_of_its_keys_is_told(name: str) -> None:
    """Each key once, what is not here with its reason. `pytest -s` shows the tables of all examples."""
    translation, config = translated(name)
    example = ALL[name][1]
    assert {key: reduce(getattr, key.split("."), config) for key in EXPECTED[name]} == EXPECTED[name]
    told = [outcome.theirs for outcome in translation.outcomes if outcome.is_given]
    assert sorted(told) == sorted(keys_of(example))
    assert translation.of(Kind.UNKNOWN) == []
    reasons = "; ".join(outcome.note for outcome in translation.of(Kind.REFUSED))
    assert (REFUSED[name] in reasons) if name in REFUSED else reasons == ""
    assert all(outcome.note for kind in (Kind.REFUSED, Kind.DIFFERS, Kind.BY_HAND) for outcome in translation.of(kind))
    text = table_text(translation)
    sys.stdout.write(f"\n{name}: {example.repository}, {example.path} at {example.commit}\n{text}\n")
    assert all(f"{outcome.theirs} " in text for outcome in translation.outcomes)


def test_rewards_keep_their_weights() -> None:
    rewards = translated("trl/simple-rl")[1].rewards
    assert [(reward.name, reward.weight) for reward in rewards] == [("math", 1.0), ("strict_format", 0.5)]
    rewards = translated("open-instruct/qwen7b")[1].rewards
    assert [(reward.name, reward.weight) for reward in rewards] == [("correctness", 10.0), ("strict_format", 1.0)]


def test_several_files_of_verl_are_a_mix_with_names() -> None:
    mix = translated("verl/math")[1].data.train.mix
    assert [(source.name, source.path) for source in mix] == [
        ("gsm8k", "/home/me/data/gsm8k/train.parquet"),
        ("math", "/home/me/data/math/train.parquet"),
    ]
