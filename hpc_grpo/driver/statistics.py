"""What a step's groups looked like: metrics, and the lines of rollouts/step_N.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hpc_grpo.driver.sampling import GradedGroup
from hpc_grpo.run.files import when_there_is_space, write_atomic
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import GroupGrades


def rollout_metrics(groups: Sequence[GradedGroup], policy_version: int) -> dict[str, float]:
    """Means over all rollouts of a step. Lag counts optimizer steps, from `policy_version` of the learner.

    `reward/mean` and its parts leave out rollouts without a valid reward; `reward/invalid_fraction` counts them.
    `reward/zero_variance_fraction` is the share of groups that teach nothing, since all their valid rewards are equal.
    """
    grades = [group.grades for group in groups]
    valid = [flag for grade in grades for flag in grade.valid]
    tokens = [count for grade in grades for count in grade.num_completion_tokens]
    lags = [policy_version - version for grade in grades for version in grade.mean_policy_versions]
    metrics = {
        "reward/mean": _mean([reward for grade in grades for reward in _valid(grade, grade.rewards)]),
        "reward/invalid_fraction": 1.0 - _mean(valid),
        "reward/zero_variance_fraction": _mean([len(set(_valid(grade, grade.rewards))) <= 1 for grade in grades]),
        "tokens/completion_mean": _mean(tokens),
        "tokens/completion_total": float(sum(tokens)),
        "tokens/truncated_fraction": _mean([cut for grade in grades for cut in grade.truncated]),
        "lag/mean": _mean(lags),
        "lag/max": float(policy_version - min(min(grade.min_policy_versions) for grade in grades)),
    }
    for name in grades[0].reward_parts:
        parts = [reward for grade in grades for reward in _valid(grade, grade.reward_parts[name])]
        metrics[f"reward/{name}"] = _mean(parts)
    return metrics


def write_rollouts(
    run_dir: RunDir, step: int, groups: Sequence[GradedGroup], advantages: Sequence[Sequence[float]]
) -> None:
    """Write the groups whose texts were kept (`rollout.logged_fraction`)."""
    lines = [
        line for group, own in zip(groups, advantages, strict=True) if group.grades.texts for line in _lines(group, own)
    ]
    if lines:
        text = "".join(json.dumps(line) + "\n" for line in lines)
        when_there_is_space(lambda: write_atomic(run_dir.rollouts(step), text), "the step's rollouts")


def _lines(group: GradedGroup, advantages: Sequence[float]) -> list[dict[str, Any]]:
    grades = group.grades
    return [
        {
            "ordinal": group.prompt.ordinal,
            "sample": index,
            "prompt": group.prompt.text,
            "completion": text,
            "reward": grades.rewards[index],
            "rewards": {name: parts[index] for name, parts in grades.reward_parts.items()},
            "valid": grades.valid[index],
            "advantage": advantages[index],
            "truncated": grades.truncated[index],
            "policy_version": grades.min_policy_versions[index],
        }
        for index, text in enumerate(grades.texts)
    ]


def _valid(grades: GroupGrades, values: Sequence[float]) -> list[float]:
    return [value for value, valid in zip(values, grades.valid, strict=True) if valid]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
