from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.driver.sampling import GradedGroup
from hpc_grpo.driver.statistics import rollout_metrics, write_rollouts
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import GroupGrades, Prompt


def group(ordinal: int, **changes: Any) -> GradedGroup:
    values: dict[str, Any] = {
        "ordinal": ordinal,
        "rewards": (1.5, 0.0),
        "reward_parts": {"correctness": (1.0, 0.0), "strict_format": (0.5, 0.0)},
        "valid": (True, True),
        "num_completion_tokens": (4, 8),
        "truncated": (False, True),
        "min_policy_versions": (5, 5),
        "mean_policy_versions": (5.0, 5.5),
    }
    prompt = Prompt(ordinal, 0, (1, 2), f"What is {ordinal}?", {"answer": "3"})
    return GradedGroup(prompt, None, GroupGrades(**{**values, **changes}))


def test_metrics_of_two_groups() -> None:
    """The second group has one valid reward left, and so no variance."""
    second = group(
        1,
        rewards=(2.0, 0.0),
        reward_parts={"correctness": (1.0, 0.0), "strict_format": (1.0, 0.0)},
        valid=(True, False),
        num_completion_tokens=(2, 2),
        truncated=(False, False),
        min_policy_versions=(4, 6),
        mean_policy_versions=(4.5, 6.0),
    )
    metrics = rollout_metrics([group(0), second], policy_version=6)
    assert metrics == {
        "reward/mean": pytest.approx(3.5 / 3),
        "reward/invalid_fraction": 0.25,
        "reward/zero_variance_fraction": 0.5,
        "tokens/completion_mean": 4.0,
        "tokens/completion_total": 16.0,
        "tokens/truncated_fraction": 0.25,
        "lag/mean": pytest.approx((1.0 + 0.5 + 1.5 + 0.0) / 4),
        "lag/max": 2.0,
        "reward/correctness": pytest.approx(2 / 3),
        "reward/strict_format": pytest.approx(1.5 / 3),
    }


def test_group_of_equal_rewards_teaches_nothing_and_is_counted() -> None:
    metrics = rollout_metrics([group(0), group(1, rewards=(1.0, 1.0))], policy_version=5)
    assert metrics["reward/zero_variance_fraction"] == 0.5


def test_step_without_any_valid_reward() -> None:
    metrics = rollout_metrics([group(0, rewards=(0.0, 0.0), valid=(False, False))], policy_version=5)
    assert metrics["reward/mean"] == 0.0
    assert metrics["reward/invalid_fraction"] == 1.0


def test_rollouts_are_written_for_groups_with_texts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_rollouts(run_dir, 3, [group(0, texts=("#### 3", "no idea")), group(1)], [(0.7, -0.7), (0.0, 0.0)])
    lines = list(read_jsonl(run_dir.rollouts(3)))
    assert lines == [
        {
            "ordinal": 0,
            "sample": 0,
            "prompt": "What is 0?",
            "completion": "#### 3",
            "reward": 1.5,
            "rewards": {"correctness": 1.0, "strict_format": 0.5},
            "valid": True,
            "advantage": 0.7,
            "truncated": False,
            "policy_version": 5,
        },
        {
            "ordinal": 0,
            "sample": 1,
            "prompt": "What is 0?",
            "completion": "no idea",
            "reward": 0.0,
            "rewards": {"correctness": 0.0, "strict_format": 0.0},
            "valid": True,
            "advantage": -0.7,
            "truncated": True,
            "policy_version": 5,
        },
    ]


def test_nothing_is_written_without_texts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_rollouts(run_dir, 3, [group(0)], [(0.0, 0.0)])
    assert not run_dir.rollouts(3).exists()
