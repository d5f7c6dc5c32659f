"""Secrets keep out of a run directory: refused before anything is written, and not told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import Config, load_config
from hpc_grpo.config.load import CONFIGS_DIR as CONFIGS
from hpc_grpo.config.load import read_layers
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.system.secret import secret_keys


def config(root: Path, *overrides: str) -> Config:
    return load_config("local/debug", [f"run.root={root}", *overrides])


def with_reward(root: Path, arguments: dict[str, Any]) -> Config:
    """A config with a reward of the user's own, which takes any arguments."""
    rewards = [{"name": "my_rewards:score", "args": arguments}]
    return config(root, f"rewards={json.dumps(rewards)}", "eval.reward=my_rewards:score")


def test_a_secret_in_launch_env_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        freeze(config(tmp_path, "launch.env.WANDB_API_KEY=abc"), [], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("launch.env.JUDGE=https://me:hunter2hunter2@judge:1", "JUDGE"),
        ("launch.env.SLACK_WEBHOOK_URL=https://x.y/z", "SLACK_WEBHOOK_URL"),
        ('launch.setup_lines=["module load x", "export PGPASS=hunter2"]', "launch.setup_lines.1"),
        ('launch.setup_lines=["export https_proxy=http://me:hunter2@proxy:1"]', "launch.setup_lines.0"),
        ('launch.notify=["curl", "https://hooks.slack.com/services/T0/B0/xyz"]', "launch.notify"),
        ("launch.slurm.extra.comment=ghp_abcdefghijklmnopqrstuvwxyz0123456789", "launch.slurm.extra.comment"),
        ('launch.notify=["env", "NTFY_KEY=hunter2", "notify-send"]', "launch.notify.1"),
        ('launch.notify=["send", "--token", "hunter2"]', "launch.notify"),
        ('launch.notify=["curl", "-H", "Authorization: Bearer hunter2hunter2", "https://x.y"]', "launch.notify.2"),
        ('launch.notify=["curl", "-u", "me:hunter2", "https://x.y"]', "launch.notify"),
        (
            'launch.reward_server={"command": ["vllm", "serve", "m", "--api-key", "hunter2"], "health_url": "http://h"}',
            "launch.reward_server.command",
        ),
        (
            'launch.container={"engine": "podman", "image": "i", "args": ["--env=HF_TOKEN=hunter2"]}',
            "launch.container.args.0",
        ),
        ("launch.slurm.extra.export=ALL,HF_TOKEN=hunter2", "launch.slurm.extra.export"),
        ('launch.setup_lines=["wandb login 0123456789abcdef0123456789abcdefhunter2"]', "launch.setup_lines.0"),
        ("data.train.path=https://me:hunter2@host/train.jsonl", "data.train.path"),
    ],
)
def test_a_secret_anywhere_in_the_config_is_refused_and_not_told(tmp_path: Path, override: str, key: str) -> None:
    with pytest.raises(ConfigError, match="must not hold secrets") as refused:
        freeze(config(tmp_path, override), [], [])
    assert key in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("hunter2", "hooks.slack", "ghp_abc", "x.y/z"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")))
def test_no_shipped_config_raises_an_alarm(name: str) -> None:
    assert secret_keys(read_layers(CONFIGS / name)) == []


def test_a_setup_line_that_reads_a_secret_where_it_is_needed_is_taken(tmp_path: Path) -> None:
    lines = ['export HF_TOKEN="$(cat ~/.token)"', "export HF_TOKEN_PATH=/home/me/token"]
    freeze(config(tmp_path, f"launch.setup_lines={json.dumps(lines)}"), [], [])


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"judge_api_key": "sk-0123456789abcdef0123"}, "judge_api_key"),
        ({"judge_key": "c0ffee0123456789c0ffee0123456789"}, "judge_key"),
        ({"judge": {"headers": {"token": "3f2504e0-4f89-11d3-9a0c-0305e82c3301"}}}, "judge.headers.token"),
        ({"tokens": ["hf_abcdefghijklmnopqrstuv"]}, "tokens.0"),
        ({"password": "hunter2"}, "password"),
        ({"headers": {"Authorization": "Bearer hunter2"}}, "headers.Authorization"),
        ({"url": "https://judge.site/?api_key=hunter2"}, "url"),
    ],
)
def test_a_secret_in_the_arguments_of_a_reward_is_refused_and_not_told(
    tmp_path: Path, arguments: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match="must not hold secrets") as caught:
        freeze(with_reward(tmp_path, arguments), [], [])
    assert f" rewards.0.args.{key}." in str(caught.value)
    assert not any(part in str(caught.value) for part in ("0123456789", "11d3", "hf_", "hunter2"))


def test_arguments_of_a_reward_that_are_named_like_a_secret_are_taken(tmp_path: Path) -> None:
    arguments = {
        "pass_k": 8,
        "pass_rate": "pass_rate_of_llama_8b",
        "answer_key": "reference_solution_2024",
        "json_key": "final_answer.value.normalized",
        "stop_token": "<|end_of_text|>",
        "token": "</s>",
        "keys": ["intermediate_steps", "final_conclusion"],
    }
    freeze(with_reward(tmp_path, arguments), [], [])
