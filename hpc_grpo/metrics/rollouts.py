"""Metrics of a step's rollouts. A new one per rollout is one line of `MEASURES`; its step's metric is the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from hpc_grpo.config import EvalConfig
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


def rollout_metrics(
    grades: Sequence[GroupGrades], policy_version: int, judged_by: EvalConfig, sources: Sequence[str] = ()
) -> dict[str, float]:
    """Average over all rollouts of a step. Lag counts optimizer steps, from `policy_version` of the learner.

    `sources` are the groups' own, where the run has several. Each source that the step has gets its own quality, as
    `NAME/SOURCE`, and `data/prompts/SOURCE` counts its groups.
    """
    lags = [policy_version - version for grade in grades for version in grade.mean_policy_versions]
    metrics = {
        **_quality(grades, judged_by),
        "tokens/completion_total": float(sum(sum(grade.num_completion_tokens) for grade in grades)),
        "lag/mean": _mean(lags),
        "lag/max": float(policy_version - min(min(grade.min_policy_versions) for grade in grades)),
    }
    scored = [grade for grade in grades if not grade.errors]
    for name in dict.fromkeys(name for grade in grades for name in grade.reward_parts):
        metrics[f"reward/{name}"] = _mean(part for grade in scored for part in grade.reward_parts.get(name, ()))
    for source in sorted(set(sources)):
        own = [grade for grade, of in zip(grades, sources, strict=True) if of == source]
        metrics |= {f"{name}/{source}": value for name, value in _quality(own, judged_by).items()}
        metrics[f"data/prompts/{source}"] = float(len(own))
    return metrics


def solved(grades: GroupGrades, judged_by: EvalConfig) -> tuple[bool, ...]:
    """Tell of each rollout `[G]` whether it solves its prompt: whether the reward that decides is high enough.

    That is `eval.reward`, or correctness, where the prompt's source has it, else the first reward, else (a distillation
    may have none) 0. The result says nothing of a group that no reward scored.
    """
    parts, name = grades.reward_parts, judged_by.reward or "correctness"
    of_name = (values for label, values in parts.items() if label.partition("#")[0] == name)
    deciding = next(of_name, next(iter(parts.values()), grades.rewards))
    return tuple(reward >= judged_by.solved_at for reward in deciding)


def _quality(grades: Sequence[GroupGrades], judged_by: EvalConfig) -> dict[str, float]:
    """Measure how well some groups did.

    `reward/mean` and `reward/solved_fraction` are means over all completions that were scored, as in evals: those that
    `rollout.mask_truncated` masks too. `reward/invalid_fraction` counts the rollouts that are masked, or that no reward
    scored; `reward/over_budget_fraction` those that used up the budget of a reward, or crashed it, and have the
    score that lowers their sum of rewards most.
    `reward/zero_variance_fraction` is the share of groups whose valid rewards are all equal: they teach nothing.
    """
    scored = [grade for grade in grades if not grade.errors]
    valid = [[reward for reward, ok in zip(grade.rewards, grade.valid, strict=True) if ok] for grade in grades]
    return {
        "reward/mean": _mean(reward for grade in scored for reward in grade.rewards),
        "reward/solved_fraction": _mean(flag for grade in scored for flag in solved(grade, judged_by)),
        "reward/invalid_fraction": 1.0 - _mean(flag for grade in grades for flag in grade.valid),
        "reward/over_budget_fraction": _mean(bool(each) for grade in grades for each in grade.over_budget),
        "reward/zero_variance_fraction": _mean(len(set(rewards)) <= 1 for rewards in valid),
        **{name: _mean(value for grade in grades for value in grade.measures[name]) for name in grades[0].measures},
    }


def selection_metrics(num_sampled: int, num_passed_over: int, dropped: Sequence[GroupGrades]) -> dict[str, float]:
    """Count the groups of a step, and those that were sampled and dropped by the reason.

    The reward failed; `rollout.mask_truncated` left fewer than two rollouts; or all rewards were equal. The mean reward
    of the latter tells solved prompts from hopeless ones.
    """
    graded = [grades for grades in dropped if not grades.errors]
    alike = [grades for grades in graded if sum(grades.valid) > 1]
    metrics = {
        "groups/sampled": float(num_sampled),
        "groups/trained": float(num_sampled - len(dropped)),
        "groups/passed_over": float(num_passed_over),
        "groups/dropped_failed": float(len(dropped) - len(graded)),
        "groups/dropped_masked": float(len(graded) - len(alike)),
        "groups/dropped_alike": float(len(alike)),
    }
    return metrics | ({"groups/alike_reward_mean": _mean(r for own in alike for r in own.rewards)} if alike else {})


def _mean(values: Iterable[float]) -> float:
    counted = list(values)
    return sum(counted) / len(counted) if counted else 0.0
