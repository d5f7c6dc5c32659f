from __future__ import annotations

import pytest

from hpc_grpo.plan.fit import changes_that_fit, largest_models
from tests.unit.plan.plan_configs import plan_7b_config


@pytest.mark.parametrize(
    ("size", "num_nodes", "overrides"),
    [
        ("7B", 1, ["train.zero_stage=2"]),
        ("7B", 2, ["train.zero_stage=2", "loss.kl.coef=0.01"]),
        ("32B", 1, []),
        ("32B", 2, ["train.offload_optimizer=cpu", "launch.object_store_gib=64"]),
        ("72B", 4, []),
    ],
)
def test_every_suggestion_is_a_config_that_fits(size: str, num_nodes: int, overrides: list[str]) -> None:
    plan = plan_7b_config(size, num_nodes, *overrides)
    assert not plan.fits
    changes = changes_that_fit(plan)
    assert changes
    for change in changes:
        assert plan_7b_config(size, change.num_nodes, *overrides, *change.text.split()).fits, change


def test_suggestions_are_minimal_and_nodes_as_few_as_possible() -> None:
    changes = changes_that_fit(plan_7b_config("7B", 2, "train.zero_stage=2", "loss.kl.coef=0.01"))
    texts = {change.text for change in changes if change.num_nodes == 2}
    assert {"train.zero_stage=3", "train.offload_optimizer=cpu", "loss.kl.coef=0.0"} <= texts
    assert not any("train.zero_stage=3 " in f"{text} " and text != "train.zero_stage=3" for text in texts)
    (more,) = [change.num_nodes for change in changes if not change.settings]
    assert not plan_7b_config("7B", more - 1, "train.zero_stage=2", "loss.kl.coef=0.01").fits


def test_the_largest_model_is_found_with_the_settings_as_they_are() -> None:
    plans = dict(largest_models(plan_7b_config("7B", 2)))
    assert [size for size, plan in plans.items() if plan.fits] == ["0.5B", "1.5B", "3B", "7B"]


def test_a_host_that_is_too_small_is_helped_by_no_change() -> None:
    assert changes_that_fit(plan_7b_config("72B", 1, "engine.engines_per_node=1")) == []
