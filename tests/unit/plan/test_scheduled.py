"""What the driver's scheduler makes of a plan: the closed form without a tail, and what a tail costs."""

from __future__ import annotations

import pytest

from hpc_grpo.plan import scheduled
from hpc_grpo.plan.expected import expected_step
from hpc_grpo.plan.fit import Plan, replanned
from hpc_grpo.plan.placement import CLOSE, ranked_splits
from hpc_grpo.plan.scheduled import EVEN, ScheduledStep, faster_with_tail, mean_tokens, scheduled_steps, simulated
from hpc_grpo.plan.time_text import time_sections
from hpc_grpo.simulate.lengths import LOGNORMAL
from tests.unit.plan.plan_configs import plan_7b_config, plan_shipped_7b

COLOCATED = ("placement.colocate=true", "placement.learners_per_node=4", "engine.engines_per_node=4")


def by_lag(plan: Plan) -> dict[int, ScheduledStep]:
    return {step.lag: step for step in scheduled_steps(plan)}


def schedule_text(plan: Plan) -> str:
    return "\n".join(list(time_sections(plan, None)[2]))


@pytest.mark.parametrize(("size", "num_nodes"), [("0.5B", 1), ("0.5B", 2), ("7B", 2), ("7B", 8), ("14B", 4)])
def test_completions_that_are_all_as_long_take_what_the_closed_form_expects(size: str, num_nodes: int) -> None:
    plan = plan_shipped_7b(size, num_nodes)
    in_turn, ahead = (simulated(plan, lag, EVEN) for lag in (0, 1))
    expected = expected_step(plan, mean_tokens(plan.config))
    assert in_turn and ahead and expected
    assert in_turn.step_s == pytest.approx(expected.in_turn_s, rel=0.02)
    assert in_turn.engines_idle == pytest.approx(expected.train_s / expected.in_turn_s, abs=0.02)
    assert in_turn.learners_idle == pytest.approx(expected.sample_s / expected.in_turn_s, abs=0.02)
    assert ahead.step_s == pytest.approx(expected.ahead_s, rel=0.02)


def test_a_lag_fills_engines_that_one_step_leaves_half_empty_which_no_closed_form_knows() -> None:
    """Each of 16 engines gets 64 sequences and decodes 256 at once: for all of them it reads the weights once."""
    plan = plan_shipped_7b("0.5B", 8)
    ahead, expected = simulated(plan, 1, EVEN), expected_step(plan, mean_tokens(plan.config))
    assert ahead and expected
    assert ahead.step_s < 0.85 * expected.ahead_s


@pytest.mark.parametrize(("size", "num_nodes"), [("0.5B", 2), ("7B", 2), ("7B", 8), ("14B", 4)])
def test_a_tail_costs_time_in_turn_and_a_lag_hides_some_of_it(size: str, num_nodes: int) -> None:
    steps = by_lag(plan_shipped_7b(size, num_nodes))
    in_turn, ahead = steps[0].with_tail, steps[1].with_tail
    assert in_turn.step_s > 1.2 * steps[0].even.step_s
    assert ahead.step_s < 0.8 * in_turn.step_s
    assert ahead.engines_idle < in_turn.engines_idle
    assert ahead.learners_idle < in_turn.learners_idle


def test_a_longer_lag_hides_what_one_step_ahead_does_not() -> None:
    """Where sampling is the longer half, a step waits for its last completion, unless the next ones are under way."""
    steps = by_lag(plan_shipped_7b("0.5B", 2, "rollout.max_policy_lag=4"))
    assert steps[1].with_tail.step_s > 1.8 * steps[1].even.step_s
    assert steps[4].with_tail.step_s < 1.3 * steps[4].even.step_s


def test_tail_or_not_the_learners_train_on_as_many_tokens() -> None:
    """At lag 4 learners set the pace of a 7B: a step takes what they do."""
    step = by_lag(plan_shipped_7b("7B", 2, "rollout.max_policy_lag=4"))[4]
    assert step.with_tail.learners_idle < 0.01
    assert step.with_tail.step_s == pytest.approx(step.even.step_s, rel=0.02)


def test_the_shorter_the_completions_the_shorter_the_step_that_is_expected_of_them() -> None:
    plan = plan_shipped_7b("7B", 2)
    longest, shorter = expected_step(plan), expected_step(plan, 1024)
    assert longest == expected_step(plan, 4096)
    assert longest is not None
    assert shorter is not None
    assert shorter.train_s == pytest.approx(longest.train_s * (1024 + 1024) / (1024 + 4096))
    assert shorter.sample_s < longest.sample_s / 4, "all of an engine's share fits its cache, and reads less of it"


@pytest.mark.parametrize(
    ("overrides", "lags"),
    [
        (("rollout.max_policy_lag=0",), [0, 1]),
        (("rollout.max_policy_lag=3",), [0, 1, 3]),
        (("rollout.max_policy_lag=8", "train.num_minibatches=4"), [0, 4, 8]),
        ((*COLOCATED, "rollout.max_policy_lag=0", "engine.gpu_memory_utilization=0.4"), [0]),
    ],
)
def test_lags_are_none_the_shortest_that_samples_a_step_ahead_and_the_configs(
    overrides: tuple[str, ...], lags: list[int]
) -> None:
    assert list(by_lag(plan_shipped_7b("7B", 4, *overrides))) == lags


def test_of_a_large_step_some_nodes_are_simulated_and_tell_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_shipped_7b("7B", 16, "rollout.prompts_per_step=512")
    parts = [simulated(plan, lag, LOGNORMAL) for lag in range(3)]
    monkeypatch.setattr(scheduled, "_MOST_ROLLOUTS", 8192)
    for lag, part in enumerate(parts):
        whole = simulated(plan, lag, LOGNORMAL)
        assert part and whole
        assert (part.setting.nodes, whole.setting.nodes) == (4, 16)
        assert part.step_s == pytest.approx(whole.step_s, rel=0.05)
        assert part.engines_idle == pytest.approx(whole.engines_idle, abs=0.03)


@pytest.mark.parametrize("shares", [LOGNORMAL, EVEN], ids=["with a tail", "even"])
@pytest.mark.parametrize("lag", [1, 2, 4])
def test_a_few_steps_tell_as_much_as_many(lag: int, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that one step leaves half empty sample several at once, and those end together: bursts of lag + 1."""
    plan = plan_shipped_7b("0.5B", 8)
    few = simulated(plan, lag, shares)
    monkeypatch.setattr(scheduled, "_ROLLOUTS", 60 * 1024)
    many = simulated(plan, lag, shares)
    assert few and many
    assert few.step_s == pytest.approx(many.step_s, rel=0.05)
    assert few.learners_idle == pytest.approx(many.learners_idle, abs=0.03)


def test_no_advantage_or_algorithm_of_a_users_is_run() -> None:
    plan = plan_shipped_7b("7B", 2)
    theirs = replanned(plan, (("loss.advantage", "nowhere:gone"),), 2)
    assert simulated(theirs, 1, LOGNORMAL) == simulated(plan, 1, LOGNORMAL)


def test_nothing_is_scheduled_where_no_time_is_expected() -> None:
    plan = plan_shipped_7b("7B", 2, "model.device=cpu")
    assert list(scheduled_steps(plan)) == []
    assert schedule_text(plan) == ""


def test_the_configs_placement_is_scheduled_beside_the_recommended_one() -> None:
    rows = [
        row for row in schedule_text(plan_7b_config("7B", 2)).splitlines() if row.startswith(("  1 + 3", "  2 + 2"))
    ]
    assert [row.split("  ")[1] for row in rows] == ["1 + 3, this config's"] * 2 + ["2 + 2, recommended"] * 2


def test_a_recommended_lag_alone_is_no_other_placement() -> None:
    text = schedule_text(plan_7b_config("0.5B", 4))
    assert "1 + 3, this config's" in text
    assert "recommended" not in text


def test_a_placement_that_does_not_fit_is_not_scheduled() -> None:
    text = schedule_text(plan_7b_config("14B", 2))
    assert "recommended" in text
    assert "this config's" not in text


@pytest.mark.parametrize(("size", "num_nodes"), [("0.5B", 1), ("7B", 1), ("7B", 8), ("14B", 2)])
def test_a_placement_is_named_where_one_is_faster_with_a_tail_than_the_recommended(size: str, num_nodes: int) -> None:
    plan = plan_7b_config(size, num_nodes)
    splits = ranked_splits(plan)
    steps = [forecast.step_s for split in splits if (forecast := simulated(split.plan, 1, LOGNORMAL))]
    found = faster_with_tail(plan, splits, steps[0])
    assert len(steps) == len(splits)
    assert (found is not None) == (steps[0] > CLOSE * min(steps))
    assert found is None or found[1].step_s <= CLOSE * min(steps)


def test_who_takes_the_faster_placement_is_told_that_it_is() -> None:
    plan = plan_shipped_7b("7B", 2)
    *_, found, settings = schedule_text(plan).splitlines()
    assert found == "With these lengths 3 + 1 is faster, 60 s a step:"
    assert settings.split() == ["placement.learners_per_node=3", "engine.engines_per_node=1"]
    followed = plan_shipped_7b("7B", 2, *settings.split())
    forecast = simulated(followed, 1, LOGNORMAL)
    assert forecast is not None
    assert faster_with_tail(followed, ranked_splits(followed), forecast.step_s) is None
    last = "With these lengths no other placement is faster by 5%."
    assert schedule_text(followed).splitlines()[-1] == last


def test_it_is_told_that_no_other_placement_is_faster_with_a_tail() -> None:
    last = schedule_text(plan_shipped_7b("1.5B", 1)).splitlines()[-1]
    assert last == "With these lengths no other placement is faster by 5%."


def test_the_configs_own_placement_may_be_faster_with_a_tail_than_the_recommended() -> None:
    last = schedule_text(plan_shipped_7b("0.5B", 4)).splitlines()[-1]
    assert last == "With these lengths this config's own 2 + 2 is faster, 7.1 s a step."


def test_the_assumed_lengths_are_told_with_their_mean() -> None:
    text = " ".join(schedule_text(plan_shipped_7b("7B", 2)).split())
    assert "lognormal with sigma 1, 1,024 tokens on average (25% of rollout.max_new_tokens), cut at 4,096" in text
