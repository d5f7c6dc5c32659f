"""The splits that plan recommends: that they fit, why they win, and what the card's default costs."""

from __future__ import annotations

import pytest

from hpc_grpo.plan.fit import Change, Plan, replanned
from hpc_grpo.simulate.assumed import simulated
from hpc_grpo.simulate.placement import CARD_DEFAULT, changed_settings, fastest_in_turn, layout, ranked_splits
from hpc_grpo.simulate.text import time_sections
from tests.unit.plan.plan_configs import PLACEMENTS, plan_7b_config, plan_shipped_7b, splits_of

COLOCATED = ("placement.colocate=true", "placement.learners_per_node=4", "engine.engines_per_node=4")
EVERY = [placement for placement in PLACEMENTS if placement.values != ("32B", 1)]


def placement_text(plan: Plan) -> str:
    return list(time_sections(plan, None))[1]


@pytest.mark.parametrize(("size", "num_nodes"), EVERY)
def test_what_is_recommended_fits_uses_every_gpu_and_is_as_fast_as_any(size: str, num_nodes: int) -> None:
    best, *others = splits_of(size, num_nodes)
    assert best.plan.fits
    learners, engines, parallel = layout(best.plan)
    assert learners + engines * parallel == 4
    safe = [split.ahead.step_s for split in others if bool(split.plan.warnings) == bool(best.plan.warnings)]
    assert best.ahead.step_s <= 1.01 * min(safe, default=best.ahead.step_s)


@pytest.mark.parametrize(("size", "num_nodes"), [("0.5B", 8), ("7B", 2), ("32B", 2)])
def test_every_split_is_one_that_the_config_can_say_and_that_fits(size: str, num_nodes: int) -> None:
    for split in splits_of(size, num_nodes):
        said = Change(changed_settings(plan_7b_config(size, num_nodes), split.plan), num_nodes).text.split()
        again = plan_7b_config(size, num_nodes, *said)
        assert again.fits
        assert simulated(again, again.config.rollout.max_policy_lag) == split.ahead


def test_a_7b_model_gets_more_learners_since_training_takes_longer_than_sampling() -> None:
    by_layout = {layout(split.plan): split.ahead for split in splits_of("7B", 2)}
    assert by_layout[CARD_DEFAULT].engines_idle > 0.7
    assert by_layout[CARD_DEFAULT].step_s == pytest.approx(2 * by_layout[2, 2, 1].step_s, rel=0.02)
    assert layout(splits_of("7B", 2)[0].plan) == (3, 1, 1)


def test_a_model_whose_weights_leave_an_engine_little_cache_gets_engines_of_two_gpus() -> None:
    by_layout = {layout(split.plan): split for split in splits_of("32B", 8)}
    wide, narrow = by_layout[2, 1, 2].plan.kv_cache, by_layout[2, 2, 1].plan.kv_cache
    assert wide is not None
    assert narrow is not None
    assert wide.num_sequences > 4 * narrow.num_sequences
    assert layout(splits_of("32B", 8)[0].plan) == (2, 1, 2)


@pytest.mark.parametrize(("size", "num_nodes"), EVERY)
def test_offload_is_recommended_only_where_the_same_split_does_not_fit_without(size: str, num_nodes: int) -> None:
    for split in splits_of(size, num_nodes):
        if split.plan.config.train.offload_optimizer == "cpu":
            kept = (("train.offload_optimizer", "none"), ("train.zero_stage", 3))
            assert not replanned(split.plan, kept, num_nodes).fits


def test_nothing_is_recommended_where_nothing_fits_and_where_no_time_is_known() -> None:
    for plan in (plan_7b_config("32B", 1), plan_7b_config("7B", 2, "model.device=cpu")):
        assert ranked_splits(plan) == []
        assert placement_text(plan) == ""


def test_a_split_whose_export_may_not_fit_is_recommended_last_and_with_a_warning() -> None:
    assert all(split.plan.warnings for split in splits_of("32B", 2))
    assert "The export collects the weights once more" in placement_text(plan_7b_config("32B", 2))


def test_the_best_in_turn_is_named_for_who_wants_no_lag() -> None:
    splits = splits_of("7B", 4)
    in_turn = fastest_in_turn(splits)
    assert in_turn.in_turn.step_s == min(split.in_turn.step_s for split in splits)


def test_a_longer_lag_of_the_config_stays() -> None:
    assert all(split.ahead.setting.lag == 4 for split in splits_of("7B", 2, "rollout.max_policy_lag=4"))


def test_the_text_says_what_to_change_and_how_long_the_configs_own_takes() -> None:
    text = placement_text(plan_7b_config("7B", 2))
    assert "Recommended, 60 s a step (this config's takes 197 s):\n" in text
    assert "placement.learners_per_node=3 engine.engines_per_node=1 rollout.max_policy_lag=1\n" in text
    assert "does not fit):" in placement_text(plan_7b_config("14B", 2))
    assert "lognormal with sigma 1, 1,024 tokens on average (25% of\nrollout.max_new_tokens), cut at 4,096" in text


def test_a_config_that_is_as_recommended_hears_that_it_is() -> None:
    plan = plan_shipped_7b("7B", 2, "placement.learners_per_node=3", "engine.engines_per_node=1")
    assert "Recommended: this config's own, 60 s a step; none is faster by 5%.\n" in placement_text(plan)


@pytest.mark.parametrize(
    ("overrides", "lags"),
    [
        (("rollout.max_policy_lag=0",), [0, 1]),
        (("rollout.max_policy_lag=3",), [0, 1, 3]),
        (("rollout.max_policy_lag=8", "train.num_minibatches=4"), [0, 4, 8]),
        ((*COLOCATED, "rollout.max_policy_lag=0", "engine.vllm.gpu_memory_utilization=0.4"), [0]),
    ],
)
def test_the_configs_own_placement_is_shown_in_turn_a_step_ahead_and_at_its_lag(
    overrides: tuple[str, ...], lags: list[int]
) -> None:
    rows = [line.split() for line in placement_text(plan_shipped_7b("7B", 4, *overrides)).splitlines()]
    assert [int(row[3]) for row in rows if row[-2:] == ["this", "config's"]] == lags
