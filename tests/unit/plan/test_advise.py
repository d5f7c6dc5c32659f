from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.plan.advise import changes_that_fit, largest_models
from hpc_grpo.plan.fit import make_plan
from hpc_grpo.plan.step import measured_steps
from hpc_grpo.plan.text import plan_text
from tests.unit.plan.plan_configs import GH200, least_config, plan_7b_config


@pytest.mark.parametrize(
    ("size", "num_nodes", "overrides"),
    [
        ("7B", 1, ["train.zero_stage=2"]),
        ("7B", 2, ["train.zero_stage=2", "loss.kl_coef=0.01"]),
        ("32B", 1, []),
        ("32B", 2, ["train.offload_optimizer=cpu", "weights.num_buffers=2"]),
        ("72B", 4, []),
    ],
)
def test_every_suggestion_is_a_config_that_fits(size: str, num_nodes: int, overrides: list[str]) -> None:
    plan = plan_7b_config(size, num_nodes, *overrides)
    assert not plan.fits
    changes = changes_that_fit(plan)
    assert changes
    for change in changes:
        config = load_config("isambard/grpo_7b_rlzero_general", [*overrides, *change.text.split()])
        assert make_plan(plan.model, config, change.num_nodes, GH200).fits, change


def test_suggestions_are_minimal_and_nodes_as_few_as_possible() -> None:
    changes = changes_that_fit(plan_7b_config("7B", 2, "train.zero_stage=2", "loss.kl_coef=0.01"))
    texts = {change.text for change in changes if change.num_nodes == 2}
    assert {"train.zero_stage=3", "train.offload_optimizer=cpu", "loss.kl_coef=0.0"} <= texts
    assert not any("train.zero_stage=3 " in f"{text} " and text != "train.zero_stage=3" for text in texts)
    (more,) = [change.num_nodes for change in changes if not change.settings]
    assert not plan_7b_config("7B", more - 1, "train.zero_stage=2", "loss.kl_coef=0.01").fits


def test_a_plan_that_fits_says_so() -> None:
    text = plan_text(plan_7b_config("7B", 2), None)
    assert "\nIt fits.\n" in text
    assert "DOES NOT FIT" not in text
    assert "Largest model with these settings, of Qwen2.5's sizes: 7B\n" in text
    assert "expected and not measured" in text


def test_sizes_above_the_largest_say_what_lacks() -> None:
    plans = dict(largest_models(plan_7b_config("7B", 2)))
    assert [size for size, plan in plans.items() if plan.fits] == ["0.5B", "1.5B", "3B", "7B"]
    assert "   14B  does not fit: learner GPU" in plan_text(plan_7b_config("7B", 2), None)


def test_nothing_helps_a_host_that_is_too_small() -> None:
    plan = plan_7b_config("72B", 1, "engine.engines_per_node=1")
    assert "take a smaller model" in plan_text(plan, None)


def lines(*seconds: float, attempt: int = 1) -> dict[int, dict[str, Any]]:
    return {step: {"attempt": attempt, "time/step_s": value} for step, value in enumerate(seconds)}


def test_the_pace_is_the_median_of_the_newest_attempt() -> None:
    metrics = {
        0: {"attempt": 1, "time/step_s": 900.0},
        1: {"attempt": 1, "time/step_s": 50.0},
        2: {"attempt": 2, "time/step_s": 90.0},
        3: {"attempt": 2, "time/step_s": 10.0},
        4: {"attempt": 2, "time/step_s": 20.0},
    }
    pace = measured_steps(metrics, {1: 1, 2: 3}, total_steps=184)
    assert pace is not None
    assert (pace.median_step_s, pace.num_steps, pace.attempt, pace.num_nodes) == (20.0, 3, 2, 3)
    assert pace.num_remaining_steps == 180
    assert pace.node_hours_left(planned_nodes=8) == 180 * 20.0 * 3 / 3600


def test_no_step_no_pace() -> None:
    assert measured_steps({}, {}, 10) is None
    assert measured_steps(lines(5.0), {}, 10) is None  # only the eval before the first step
    assert measured_steps({1: {"attempt": 1, "time/step_s": float("nan")}}, {}, 10) is None


def test_node_hours_need_the_length_of_the_run() -> None:
    pace = measured_steps(lines(1.0, 2.0), {}, None)
    assert pace is not None
    assert pace.node_hours_left(2) is None
    text = plan_text(make_plan(plan_7b_config("7B", 2).model, least_config(train={"zero_stage": 3}), 2, GH200), pace)
    assert "Step time: 2.0 s, the median of 1 step of attempt 1." in text
    assert "Node-hours left: not known" in text


def test_a_pace_measured_on_other_nodes_is_said() -> None:
    pace = measured_steps(lines(0.0, 3600.0), {1: 4}, 11)
    text = plan_text(plan_7b_config("7B", 2), pace)
    assert "Node-hours left: 40.0, for 10 steps." in text
    assert "(on 4 nodes; how it changes with 2 was not measured)" in text
