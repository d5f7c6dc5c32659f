"""Metrics of a step's rollouts. A new metric per rollout is one line of `MEASURES`; the step's metric is the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

from hpc_grpo.config import EvalConfig
from hpc_grpo.types import Episode, GroupGrades

Measures = Mapping[str, Callable[[Episode, str], float]]
MEASURES: Measures = {
    "tokens/completion_mean": lambda episode, text: episode.num_sampled_tokens,
    "tokens/truncated_fraction": lambda episode, text: episode.finish_reason == "length",
}
"""Metric name -> function of a rollout and the text of its last turn."""

IN_ENVIRONMENT: Measures = {
    "episode/turns": lambda episode, text: len(episode.turns),
    "episode/observed_tokens": lambda episode, text: sum(len(turn.context_ids) for turn in episode.turns[1:]),
    "episode/failed_fraction": lambda episode, text: bool(episode.failure),
}
"""Measures of an episode with an environment, besides the environment's own."""


def measure(
    episodes: Sequence[Episode], texts: Sequence[str], *, in_environment: bool = False
) -> dict[str, tuple[float, ...]]:
    """Return the measures of a group by name, each `[G]`. Runs in the grader's process, which has tokens and texts.

    An environment's own metric is `episode/NAME`; an episode that lacks the metric has 0.0.
    """
    measures = {
        name: tuple(float(of(episode, text)) for episode, text in zip(episodes, texts, strict=True))
        for name, of in {**MEASURES, **(IN_ENVIRONMENT if in_environment else {})}.items()
    }
    for name in sorted({name for episode in episodes for name in episode.metrics}):
        measures[f"episode/{name}"] = tuple(float(episode.metrics.get(name, 0.0)) for episode in episodes)
    return measures


def rollout_metrics(
    grades: Sequence[GroupGrades], policy_version: int, judged_by: EvalConfig, sources: Sequence[str] = ()
) -> dict[str, float]:
    """Average over all rollouts of a step. Lags are the learner's `policy_version` minus the rollout's version.

    `sources` are the groups' sources, if the run has several. Each source in the step gets its quality metrics, as
    `NAME/SOURCE`, and `data/prompts/SOURCE` counts its groups.
    """
    lags = [policy_version - own for grade in grades for own in grade.mean_policy_versions if own >= 0]
    oldest = [own for grade in grades for own in grade.min_policy_versions if own >= 0]
    metrics = {
        **_quality(grades, judged_by),
        "tokens/completion_total": float(sum(sum(grade.num_completion_tokens) for grade in grades)),
        "lag/mean": _mean(lags),
        "lag/max": float(policy_version - min(oldest, default=policy_version)),
    }
    for name in dict.fromkeys(name for grade in grades for name in grade.reward_parts):
        metrics[f"reward/{name}"] = _mean(
            part for grade in grades for part in compress(grade.reward_parts.get(name, ()), grade.is_scored)
        )
    for source in sorted(set(sources)):
        own = [grade for grade, of in zip(grades, sources, strict=True) if of == source]
        metrics |= {f"{name}/{source}": value for name, value in _quality(own, judged_by).items()}
        metrics[f"data/prompts/{source}"] = float(len(own))
    return metrics


def lines_of_turns(grades: GroupGrades) -> list[list[dict[str, Any]]]:
    """Return the turns of each rollout, in the form of rollout files; [] without an environment or kept texts."""
    return [
        [
            {"observation": told, "text": written, "reward": reward}
            for (told, written), reward in zip(turns, rewards, strict=True)
        ]
        for turns, rewards in zip(grades.shown_turns, grades.turn_rewards, strict=bool(grades.shown_turns))
    ]


def solved(grades: GroupGrades, judged_by: EvalConfig) -> tuple[bool, ...]:
    """Return for each rollout `[G]` whether its deciding reward is at least `eval.solved_at`.

    The deciding reward is `eval.reward`, by default correctness. If the prompt's source does not have it, the first
    reward decides. Without rewards (distillation) the reward is 0. The result is meaningless if a reward failed.
    """
    parts, name = grades.reward_parts, judged_by.reward or "correctness"
    of_name = (values for label, values in parts.items() if label.partition("#")[0] == name)
    deciding = next(of_name, next(iter(parts.values()), grades.rewards))
    return tuple(reward >= judged_by.solved_at for reward in deciding)


def _quality(grades: Sequence[GroupGrades], judged_by: EvalConfig) -> dict[str, float]:
    """Measure the quality of some groups.

    `reward/mean` and `reward/solved_fraction` are means over all scored completions, as in evals. They include
    completions masked by `rollout.mask_truncated`. `reward/invalid_fraction` is the share of rollouts that are masked
    or have no score. `reward/over_budget_fraction` is the share that used up a reward's time limit or crashed a reward,
    and so has the reward's worst score. `reward/zero_variance_fraction` is the share of groups whose
    valid rewards are all equal. Most `loss.advantage` choices give these groups the advantage 0. An environment's own
    metric is the mean over rollouts in environments; episodes without the metric count as 0.
    """
    valid = [[reward for reward, ok in zip(grade.rewards, grade.valid, strict=True) if ok] for grade in grades]
    return {
        "reward/mean": _mean(reward for grade in grades for reward in compress(grade.rewards, grade.is_scored)),
        "reward/solved_fraction": _mean(
            flag for grade in grades for flag in compress(solved(grade, judged_by), grade.is_scored)
        ),
        "reward/invalid_fraction": 1.0 - _mean(flag for grade in grades for flag in grade.valid),
        "reward/over_budget_fraction": _mean(bool(each) for grade in grades for each in grade.over_budget),
        "reward/zero_variance_fraction": _mean(len(set(rewards)) <= 1 for rewards in valid),
        **{name: _mean(_measured(name, grades)) for name in dict.fromkeys(n for own in grades for n in own.measures)},
    }


def _measured(name: str, grades: Sequence[GroupGrades]) -> Iterator[float]:
    is_of_episodes = name.startswith("episode/")
    for own in grades:
        if not is_of_episodes or own.turn_rewards:
            yield from own.measures.get(name, (0.0,) * len(own.rewards))


def selection_metrics(num_sampled: int, num_passed_over: int, dropped: Sequence[GroupGrades]) -> dict[str, float]:
    """Count the groups of a step, and the sampled groups that were dropped, by reason.

    A group is `dropped_failed` if at most one rollout has a score, because rewards or the environment failed. It is
    `dropped_masked` if `rollout.mask_truncated` leaves at most one valid rollout. Otherwise it is `dropped_alike`: its
    rewards are equal. `alike_reward_mean` tells solved prompts from prompts that are too hard.
    """
    graded = [grades for grades in dropped if sum(grades.is_scored) > 1]
    alike = [grades for grades in graded if sum(grades.valid) > 1]
    metrics = {
        "groups/sampled": float(num_sampled),
        "groups/trained": float(num_sampled - len(dropped)),
        "groups/passed_over": float(num_passed_over),
        "groups/dropped_failed": float(len(dropped) - len(graded)),
        "groups/dropped_masked": float(len(graded) - len(alike)),
        "groups/dropped_alike": float(len(alike)),
    }
    if alike:
        metrics["groups/alike_reward_mean"] = _mean(r for own in alike for r in compress(own.rewards, own.is_scored))
    return metrics


def _mean(values: Iterable[float]) -> float:
    counted = list(values)
    return sum(counted) / len(counted) if counted else 0.0
