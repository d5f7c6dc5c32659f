from __future__ import annotations

from pathlib import Path

from hpc_grpo.launch.supervisor.attempt_setup import needed_everywhere
from tests.support.configs import minimal_config


def test_models_and_what_rewards_are_given_are_needed_on_every_node_and_data_is_not(tmp_path: Path) -> None:
    for name in ("model", "judge", "rows"):
        (tmp_path / name).mkdir()
    rewards = [{"name": "short", "args": {"judge": str(tmp_path / "judge"), "url": "/score", "limit": 3}}]
    config = minimal_config(
        model={"path": str(tmp_path / "model")},
        data={"train": {"path": str(tmp_path / "rows")}},
        rewards=rewards,
        distill={"teacher": "Qwen/Qwen2.5-7B"},
    )
    assert needed_everywhere(config) == {
        "model.path": str(tmp_path / "model"),
        "rewards.0.args.judge": str(tmp_path / "judge"),
    }
