"""The placement that the shipped 7B config has: two learners and two engines on one node, rollouts a step ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.ledger import check_ledger
from tests.integration.training_runs import complete_in_cluster, metrics_of, tiny_config

pytestmark = pytest.mark.integration


def test_two_learners_beside_two_engines_train_a_step_behind_them(workspace: Path, cluster: dict[str, str]) -> None:
    config = tiny_config(
        workspace,
        "two-learners",
        placement={"learners_per_node": 2},
        engine={"engines_per_node": 2},
        train={"total_steps": 4, "zero_stage": 3},
        rollout={"max_policy_lag": 1},
    )
    run = complete_in_cluster(cluster, config)
    metrics = metrics_of(run)
    assert max(values["lag/max"] for values in metrics.values()) == 1
    assert max(values["mismatch/kl"] for step, values in metrics.items() if step == 1) < 1e-6
    checkpoint = next(valid_checkpoints(run))
    assert checkpoint.manifest.world_size == 2
    assert check_ledger(run).is_sound
