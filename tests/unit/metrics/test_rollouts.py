from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpc_grpo.config import EvalConfig
from hpc_grpo.episodes import OWN_METRICS
from hpc_grpo.metrics.rollouts import IN_ENVIRONMENT, MEASURES, measure, rollout_metrics, selection_metrics, solved
from hpc_grpo.types import Completion, Episode, FinishReason, GroupGrades
from tests.support.sequences import single_answers

JUDGED_BY = EvalConfig(reward="correctness")


def group(ordinal: int, **changes: Any) -> GroupGrades:
    values: dict[str, Any] = {
        "ordinal": ordinal,
        "rewards": (1.5, 0.0),
        "reward_parts": {"correctness": (1.0, 0.0), "strict_format": (0.5, 0.0)},
        "valid": (True, True),
        "num_completion_tokens": (4, 8),
        "truncated": (False, True),
        "min_policy_versions": (5, 5),
        "mean_policy_versions": (5.0, 5.5),
        "measures": {"tokens/completion_mean": (4.0, 8.0), "tokens/truncated_fraction": (0.0, 1.0)},
        "over_budget": ("", ""),
    }
    return GroupGrades(**{**values, **changes})


def episode(num_tokens: int, reason: FinishReason) -> Episode:
    tokens = np.ones(num_tokens, np.int32)
    return single_answers(0, [1], [Completion(tokens, np.zeros(num_tokens, np.float32), tokens, reason)]).episodes[0]


def test_metrics_of_two_groups() -> None:
    """Of the second group one rollout is masked: it has no variance left, and its reward counts all the same."""
    second = group(
        1,
        rewards=(2.0, 0.0),
        reward_parts={"correctness": (1.0, 0.0), "strict_format": (1.0, 0.0)},
        valid=(True, False),
        num_completion_tokens=(2, 2),
        truncated=(False, False),
        min_policy_versions=(4, 6),
        mean_policy_versions=(4.5, 6.0),
        over_budget=("", "reward 'correctness': took more than 1 s of processor time"),
        measures={"tokens/completion_mean": (2.0, 2.0), "tokens/truncated_fraction": (0.0, 0.0)},
    )
    metrics = rollout_metrics([group(0), second], policy_version=6, judged_by=JUDGED_BY)
    assert metrics == {
        "reward/mean": pytest.approx(3.5 / 4),
        "reward/solved_fraction": pytest.approx(2 / 4),
        "reward/invalid_fraction": 0.25,
        "reward/over_budget_fraction": 0.25,
        "reward/zero_variance_fraction": 0.5,
        "tokens/completion_mean": 4.0,
        "tokens/completion_total": 16.0,
        "tokens/truncated_fraction": 0.25,
        "lag/mean": pytest.approx((1.0 + 0.5 + 1.5 + 0.0) / 4),
        "lag/max": 2.0,
        "reward/correctness": pytest.approx(2 / 4),
        "reward/strict_format": pytest.approx(1.5 / 4),
    }


def test_a_group_of_equal_rewards_teaches_nothing_and_is_counted() -> None:
    metrics = rollout_metrics([group(0), group(1, rewards=(1.0, 1.0))], policy_version=5, judged_by=JUDGED_BY)
    assert metrics["reward/zero_variance_fraction"] == 0.5


def test_a_step_without_any_valid_reward_has_a_mean_of_zero() -> None:
    metrics = rollout_metrics(
        [group(0, rewards=(0.0, 0.0), valid=(False, False))], policy_version=5, judged_by=JUDGED_BY
    )
    assert metrics["reward/mean"] == 0.0
    assert metrics["reward/invalid_fraction"] == 1.0


def test_completions_that_were_cut_count_in_the_mean_and_groups_that_no_reward_scored_do_not() -> None:
    """Else the mean rises as `rollout.mask_truncated` masks more wrong completions."""
    cut = group(0, rewards=(1.0, 0.0), valid=(True, False), truncated=(False, True))
    failed = group(1, rewards=(0.0, 0.0), valid=(False, False), errors=("prompt 1, reward 'judge': away",))
    metrics = rollout_metrics([cut, failed], policy_version=5, judged_by=JUDGED_BY)
    assert (metrics["reward/mean"], metrics["reward/invalid_fraction"]) == (0.5, 0.75)


def test_of_several_sources_each_has_metrics_of_its_own() -> None:
    right = group(1, rewards=(2.0, 1.0), reward_parts={"correctness": (1.0, 1.0)}, num_completion_tokens=(1, 1))
    groups, sources = [group(0), right, group(2, valid=(True, False))], ["gcd", "sums", "gcd"]
    metrics = rollout_metrics(groups, 5, JUDGED_BY, sources)
    assert {name: value for name, value in metrics.items() if name.endswith("/gcd")} == {
        "reward/mean/gcd": pytest.approx(3.0 / 4),
        "reward/solved_fraction/gcd": pytest.approx(2 / 4),
        "reward/invalid_fraction/gcd": 0.25,
        "reward/over_budget_fraction/gcd": 0.0,
        "reward/zero_variance_fraction/gcd": 0.5,
        "tokens/completion_mean/gcd": 6.0,
        "tokens/truncated_fraction/gcd": 0.5,
        "data/prompts/gcd": 2.0,
    }
    assert (metrics["reward/solved_fraction/sums"], metrics["data/prompts/sums"]) == (1.0, 1.0)
    assert metrics["reward/solved_fraction"] == pytest.approx(4 / 6)
    assert not any("/gcd" in name for name in rollout_metrics(groups, 5, JUDGED_BY))


def test_what_solves_a_prompt_is_the_reward_that_eval_names_or_correctness_else_the_first() -> None:
    parts = {"length": (1.0, 0.0), "regex#2": (0.25, 0.5)}
    assert solved(group(0, reward_parts=parts), EvalConfig(reward="regex", solved_at=0.5)) == (False, True)
    for of_none in (EvalConfig(), EvalConfig(reward="correctness")):
        assert solved(group(0, reward_parts=parts), of_none) == (True, False)
        with_correctness = group(0, reward_parts={**parts, "correctness": (0.0, 1.0)})
        assert solved(with_correctness, of_none) == (False, True)


def test_a_completion_is_measured_once_by_every_measure() -> None:
    measures = measure([episode(3, "stop"), episode(5, "length")], ["yes", "no..."])
    assert measures["tokens/completion_mean"] == (3.0, 5.0)
    assert measures["tokens/truncated_fraction"] == (0.0, 1.0)
    assert measures.keys() == MEASURES.keys()


def test_an_episode_is_measured_in_its_environment_and_nothing_else_is() -> None:
    first = replace(episode(3, "stop"), metrics={"calls": 2.0})
    second = replace(first.turns[0], context_ids=np.zeros(4, np.int32), starts_anew=False)
    episodes = [replace(first, turns=(*first.turns, second)), Episode((), "stop", failure="reset raised ValueError")]
    measures = measure(episodes, ["", ""], in_environment=True)
    assert {name: own for name, own in measures.items() if name.startswith("episode/")} == {
        "episode/turns": (2.0, 0.0),
        "episode/observed_tokens": (4.0, 0.0),
        "episode/failed_fraction": (0.0, 1.0),
        "episode/calls": (2.0, 0.0),
    }
    assert {*IN_ENVIRONMENT, "episode/env_s"} == {f"episode/{name}" for name in OWN_METRICS}, "none may be taken twice"
    assert measures["tokens/completion_mean"] == (6.0, 0.0)
    turn_rewards, failures = ((1.5, 0.0), ()), ("", "reset raised ValueError")
    played = group(0, measures=measures, turn_rewards=turn_rewards, failures=failures, mean_policy_versions=(5.0, -1.0))
    idle = {name: own for name, own in measures.items() if name != "episode/calls"}
    metrics = rollout_metrics([played, group(1), replace(played, measures=idle)], 6, JUDGED_BY)
    assert (metrics["episode/turns"], metrics["episode/calls"], metrics["episode/failed_fraction"]) == (1.0, 0.5, 0.5)
    assert metrics["reward/mean"] == pytest.approx(4.5 / 4), "a failed episode was not scored"
    assert metrics["lag/mean"] == pytest.approx((1.0 + 1.0 + 0.5 + 1.0) / 4)
    assert not any(name.startswith("episode/") for name in rollout_metrics([group(1)], 6, JUDGED_BY))


def test_groups_that_environments_failed_are_counted_apart_from_those_that_were_masked() -> None:
    failed = group(0, valid=(True, False), turn_rewards=((1.0,), ()), failures=("", "gone"))
    metrics = selection_metrics(3, 0, [failed, group(1, valid=(True, False))])
    assert (metrics["groups/dropped_failed"], metrics["groups/dropped_masked"]) == (1.0, 1.0)


def test_without_rewards_nothing_is_solved() -> None:
    """A distillation may have none."""
    ungraded = group(0, rewards=(0.0, 0.0), reward_parts={})
    assert solved(ungraded, JUDGED_BY) == (False, False)
    assert rollout_metrics([ungraded], policy_version=5, judged_by=JUDGED_BY)["reward/solved_fraction"] == 0.0
