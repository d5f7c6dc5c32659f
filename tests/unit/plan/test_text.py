"""Sentences of a plan that depend on what was found."""

from __future__ import annotations

import pytest

from hpc_grpo.plan.disk import disk_budget
from hpc_grpo.plan.text import size_sections
from hpc_grpo.simulate.measured import MeasuredAttempt
from hpc_grpo.simulate.text import plan_text, time_sections
from hpc_grpo.system.disk import Room
from tests.unit.plan.plan_configs import plan_7b_config

pytestmark = pytest.mark.usefixtures("quick_plans")


def test_a_plan_that_fits_says_so() -> None:
    plan = plan_7b_config("7B", 2)
    text = "\n\n".join(size_sections(plan, disk_budget(plan, Room(2**50, "free"))))
    assert "\nIt fits.\n" in text
    assert "DOES NOT FIT" not in text
    assert "Largest model with these settings, of Qwen2.5's sizes: 7B\n" in text


def test_a_step_that_is_filled_is_planned_with_its_bound() -> None:
    text = " ".join(plan_text(plan_7b_config("7B", 2, "rollout.dynamic_sampling=3")).split())
    assert "Up to 3 times as many if groups are replaced (rollout.dynamic_sampling = 3); the run" in text
    assert "With the most that rollout.dynamic_sampling = 3 may sample: " in text


def test_a_size_that_does_not_fit_is_listed_with_what_lacks() -> None:
    assert "   14B  does not fit: learner GPU" in plan_text(plan_7b_config("7B", 2))


def test_without_a_change_that_helps_a_smaller_model_is_advised() -> None:
    plan = plan_7b_config("72B", 1, "engine.engines_per_node=1")
    assert "take a smaller model" in plan_text(plan)


def measured(median_s: float, num_nodes: int | None, total_steps: int | None) -> MeasuredAttempt:
    return MeasuredAttempt(1, ({"time/step_s": median_s},), num_nodes, last_step=1, total_steps=total_steps)


def test_the_time_of_measured_steps_is_given_without_node_hours_while_the_length_is_not_known() -> None:
    plan = plan_7b_config("7B", 2)
    text, _ = time_sections(plan, measured(2.0, None, None))
    assert "Step time: 2.0 s, the median of 1 step of attempt 1." in text
    assert "Node-hours left: not known" in text
    assert f"hpc-grpo plan {plan.config.run_path}\n" in text


def test_steps_measured_on_other_nodes_are_given_with_their_number() -> None:
    text = "\n".join(time_sections(plan_7b_config("7B", 2), measured(3600.0, 4, 11)))
    assert "Node-hours left: 40.0, for 10 steps." in text
    assert "A run that has trained may change learners and engines, not the ZeRO stage" in text
    assert "(on 4 nodes; how it changes with 2 was not measured)" in text


def test_gpus_that_no_job_asks_for_are_named_beside_the_verdict() -> None:
    plan = plan_7b_config("7B", 2, "launch.slurm.extra.exclusive=false", "launch.slurm.gpus_per_node=0")
    text = "\n\n".join(size_sections(plan, disk_budget(plan, Room(2**50, "free"))))
    assert "\nIt fits nodes with 4 GPUs each.\nlaunch.slurm.gpus_per_node = 0 requests no GPU: " in text


def test_a_run_that_fits_in_memory_alone_is_not_said_to_fit() -> None:
    plan = plan_7b_config("7B", 2)
    text = "\n\n".join(size_sections(plan, disk_budget(plan, Room(2**30, "free"))))
    assert "\nIt fits in memory, but not on the disk here: see below.\n" in text
