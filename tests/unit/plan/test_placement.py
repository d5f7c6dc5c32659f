"""The splits that plan recommends: that they fit, why they win, and what the card's default costs."""

from __future__ import annotations

import re

import pytest

from hpc_grpo.plan.advise import Change
from hpc_grpo.plan.expected import expected_step
from hpc_grpo.plan.fit import Plan, replanned
from hpc_grpo.plan.placement import CARD_DEFAULT, Split, changed_settings, fastest_in_turn, ranked_splits
from hpc_grpo.plan.text import plan_text
from tests.unit.plan.plan_configs import plan_7b_config, plan_shipped_7b

SIZES = ("0.5B", "1.5B", "7B", "14B", "32B")
NODES = (1, 2, 4, 8)
EVERY = [(size, nodes) for size in SIZES for nodes in NODES if (size, nodes) != ("32B", 1)]


def best(plan: Plan) -> Split:
    return ranked_splits(plan)[0]


@pytest.mark.parametrize(("size", "num_nodes"), EVERY)
def test_what_is_recommended_fits_uses_every_gpu_and_is_never_slower_than_the_default(
    size: str, num_nodes: int
) -> None:
    plan = plan_7b_config(size, num_nodes)
    split = best(plan)
    assert split.plan.fits
    learners, engines, parallel = split.layout
    assert learners + engines * parallel == 4
    default = expected_step(plan)
    assert default is not None
    assert split.step.step_s <= default.step_s
    assert split.step.step_s <= min(other.step.step_s for other in ranked_splits(plan))


@pytest.mark.parametrize(("size", "num_nodes"), EVERY)
def test_every_split_is_one_that_the_config_can_say_and_that_fits(size: str, num_nodes: int) -> None:
    for split in ranked_splits(plan_7b_config(size, num_nodes)):
        said = Change(changed_settings(plan_7b_config(size, num_nodes), split), num_nodes).text.split()
        again = plan_7b_config(size, num_nodes, *said)
        assert again.fits
        assert expected_step(again) == split.step


def test_the_default_stays_the_best_for_a_small_model_whose_steps_are_spent_on_sampling() -> None:
    split = best(plan_7b_config("0.5B", 8))
    assert split.layout == CARD_DEFAULT
    assert split.step.sample_s > split.step.train_s


def test_a_7b_model_gets_a_second_learner_since_training_takes_longer_than_sampling() -> None:
    plan = plan_7b_config("7B", 2)
    default, split = expected_step(plan), best(plan)
    assert default is not None
    assert default.train_s > 4 * default.sample_s
    assert split.layout == (2, 2, 1)
    assert split.step.train_s == pytest.approx(default.train_s / 2)
    assert split.step.sample_s <= split.step.train_s


def test_a_model_whose_weights_leave_an_engine_little_cache_gets_engines_of_two_gpus() -> None:
    by_layout = {split.layout: split for split in ranked_splits(plan_7b_config("32B", 8))}
    wide, narrow = by_layout[2, 1, 2].plan.kv_cache, by_layout[2, 2, 1].plan.kv_cache
    assert wide is not None
    assert narrow is not None
    assert wide.num_sequences > 4 * narrow.num_sequences
    assert best(plan_7b_config("32B", 8)).layout == (2, 1, 2)


@pytest.mark.parametrize(("size", "num_nodes"), EVERY)
def test_offload_is_recommended_only_where_the_same_split_does_not_fit_without(size: str, num_nodes: int) -> None:
    for split in ranked_splits(plan_7b_config(size, num_nodes)):
        if split.zero[1] == "cpu":
            kept = (("train.offload_optimizer", "none"), ("train.zero_stage", 3))
            assert not replanned(split.plan, kept, num_nodes).fits


def test_nothing_is_recommended_where_nothing_fits_and_where_no_time_is_known() -> None:
    assert ranked_splits(plan_7b_config("32B", 1)) == []
    assert ranked_splits(plan_7b_config("7B", 2, "model.device=cpu")) == []
    assert "Placements of" not in plan_text(plan_7b_config("32B", 1), None)


def test_a_split_whose_export_may_not_fit_is_recommended_last_and_with_a_warning() -> None:
    plan = plan_7b_config("32B", 2)
    assert all(split.plan.warnings for split in ranked_splits(plan))
    assert "The export collects the weights once more" in plan_text(plan, None)


def test_the_best_in_turn_is_named_for_who_wants_no_lag() -> None:
    splits = ranked_splits(plan_7b_config("7B", 4))
    assert fastest_in_turn(splits).step.in_turn_s == min(split.step.in_turn_s for split in splits)


def test_a_longer_lag_of_the_config_stays() -> None:
    plan = plan_7b_config("7B", 2, "rollout.max_policy_lag=4")
    assert all(split.plan.config.rollout.max_policy_lag == 4 for split in ranked_splits(plan))


def test_the_text_says_where_the_default_is_wrong() -> None:
    text = plan_text(plan_7b_config("7B", 2), None)
    assert re.search(r"Recommended, \d+ s a step \(this config's takes \d+ s\):\n", text)
    assert "placement.learners_per_node=2 engine.engines_per_node=2 rollout.max_policy_lag=1\n" in text
    assert "  the default\n" in text
    assert "does not fit):" in plan_text(plan_7b_config("14B", 2), None)


def test_a_config_that_is_as_recommended_hears_that_it_is() -> None:
    assert "Recommended: this config's own, " in plan_text(plan_shipped_7b("7B", 2), None)
