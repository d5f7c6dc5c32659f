"""Metrics of a step's rollouts. A new one per rollout is one line of `MEASURES`; its step's metric is the mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpc_grpo.types import Completion, GroupGrades

MEASURES: Mapping[str, Callable[[Completion, str], float]] = {
    "tokens/completion_mean": lambda completion, text: len(completion.token_ids),
    "tokens/truncated_fraction": lambda completion, text: completion.finish_reason == "length",
}
"""Measures of a completion and its text, by the metric's name."""


def measure(completions: Sequence[Completion], texts: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Measure a group, each measure `[G]`, in the grader's process: the driver sees neither tokens nor texts."""
    return {
        name: tuple(float(of(completion, text)) for completion, text in zip(completions, texts, strict=True))
        for name, of in MEASURES.items()
    }


def rollout_metrics(grades: Sequence[GroupGrades], policy_version: int) -> dict[str, float]:
    """Average over all rollouts of a step. Lag counts optimizer steps, from `policy_version` of the learner.

    `reward/mean` and its parts leave out rollouts without a valid reward; `reward/invalid_fraction` counts them.
    `reward/zero_variance_fraction` is the share of groups that teach nothing, since all their valid rewards are equal.
    """
    valid = [flag for grade in grades for flag in grade.valid]
    lags = [policy_version - version for grade in grades for version in grade.mean_policy_versions]
    metrics = {
        "reward/mean": _mean([reward for grade in grades for reward in _valid(grade, grade.rewards)]),
        "reward/invalid_fraction": 1.0 - _mean(valid),
        "reward/zero_variance_fraction": _mean([len(set(_valid(grade, grade.rewards))) <= 1 for grade in grades]),
        "tokens/completion_total": float(sum(sum(grade.num_completion_tokens) for grade in grades)),
        "lag/mean": _mean(lags),
        "lag/max": float(policy_version - min(min(grade.min_policy_versions) for grade in grades)),
    }
    for name in grades[0].measures:
        metrics[name] = _mean([value for grade in grades for value in grade.measures[name]])
    for name in dict.fromkeys(name for grade in grades for name in grade.reward_parts):
        graded = [grade for grade in grades if name in grade.reward_parts]
        parts = [reward for grade in graded for reward in _valid(grade, grade.reward_parts[name])]
        metrics[f"reward/{name}"] = _mean(parts)
    return metrics


def _valid(grades: GroupGrades, values: Sequence[float]) -> list[float]:
    return [value for value, valid in zip(values, grades.valid, strict=True) if valid]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
