"""Reward workers know no secret but those that a reward names."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.grading.pool import RewardPool

SECRETS = {
    "WANDB_API_KEY": "planted-1",
    "HF_TOKEN": "planted-2",
    "JUDGE_KEY": "planted-3",
    "SITE": "https://user:planted-4@host/x",
    "https_proxy": "http://user:planted-5@proxy:3128",
}
OWN = """
import os
def knows(prompts, completions, **columns):
    return [float(name in os.environ) for name in completions]
"""


def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *others: RewardConfig, **options: Any) -> set[str]:
    """Which variables a user's reward finds in its worker."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "own.py"
    own.write_text(OWN)
    names = [*SECRETS, "PATH"]
    rewards = [RewardConfig(name=f"{own}:knows", **options), *others]
    with closing(RewardPool(rewards, num_workers=1)) as pool:
        outcome = pool.submit("p", names, {}, {"own": rewards[0]}).result()
    assert outcome.errors == ()
    return {name for name, score in zip(names, outcome.rewards, strict=True) if score}


def test_a_worker_gets_no_secret_that_no_reward_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(tmp_path, monkeypatch) == {"PATH"}


def test_a_reward_gets_the_secrets_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert known(tmp_path, monkeypatch, pass_env=["HF_TOKEN"]) == {"PATH", "HF_TOKEN"}
    assert known(tmp_path, monkeypatch, args={"api_key_env": "JUDGE_KEY"}) == {"PATH", "JUDGE_KEY"}


def test_a_built_in_that_asks_a_server_knows_the_way_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = RewardConfig(name="llm_judge", args={"url": "https://judge/v1", "model": "m", "api_key_env": "JUDGE_KEY"})
    assert known(tmp_path, monkeypatch, judge) == {"PATH", "JUDGE_KEY", "https_proxy"}
