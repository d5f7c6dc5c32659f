"""Whole runs on CPU that no other test trains to COMPLETE: PPO and distillation, each at a placement of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.run.ledger import check_ledger
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import complete_in_cluster, metrics_of, tiny_config

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("name", "sections", "metric", "least", "most"),
    [
        ("ppo", {"task": {"name": "ppo", "critic_lr": 1e-2}, "engine": {"engines_per_node": 3}}, "reward/mean", 1.4, 9),
        ("distill", {"task": "distill", "engine": {"tensor_parallel": 2}}, "kl/learner_teacher", 0, 0.8),
    ],
    ids=["PPO with three engines", "distillation with an engine of two processes"],
)
def test_a_run_trains_and_its_engines_follow(
    workspace: Path,
    cluster: dict[str, str],
    name: str,
    sections: Mapping[str, Any],
    metric: str,
    least: float,
    most: float,
) -> None:
    """`metric` of the last step, as a multiple of the first step's, lies between `least` and `most`."""
    if name == "distill":
        sections = {**sections, "task": {"name": "distill", "teacher": str(workspace / "untied")}}
    run = complete_in_cluster(cluster, tiny_config(workspace, name, **sections, train={"total_steps": 6}))
    metrics = metrics_of(run)
    assert list(metrics) == list(range(1, 7))
    assert max(values["mismatch/logprob_abs_diff_max"] for values in metrics.values()) < TOLERANCE
    assert least < metrics[6][metric] / metrics[1][metric] < most
    assert check_ledger(run).is_sound
