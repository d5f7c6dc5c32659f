"""Who stands still is noticed, ended and replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.run.ledger import check_ledger
from tests.integration.training_runs import HERE, LETTERS, Attempt, metrics_of, tiny_config

pytestmark = pytest.mark.integration


def test_an_engine_and_a_grader_that_hang_in_c_are_ended_and_replaced(workspace: Path, cluster: dict[str, str]) -> None:
    config = tiny_config(
        workspace,
        "hanging",
        train={"total_steps": 7},
        rewards=[{"name": LETTERS, "timeout_s": 1.0}],
        deadlines={"silent_s": 2.0, "start_s": 300.0},
    )
    with Attempt.in_cluster(cluster, config, str(HERE / "hanging_driver.py")) as attempt:
        run_dir = attempt.wait_to_end()
    starts = [line.split(" on ")[0] for line in attempt.text.splitlines() if "died; starting another" in line]
    assert sorted(starts) == ["A grader", "An engine"], attempt.text
    assert {path.name for path in run_dir.path.glob("hung-*")} == {"hung-engine", "hung-grader"}
    verdict = check_ledger(run_dir)
    assert verdict.is_sound, verdict
    assert (verdict.steps, verdict.undone) == (7, 0)
    metrics = metrics_of(run_dir)
    assert metrics[7]["engine/restarts"] == metrics[7]["grading/restarts"] == 1
    assert {values["reward/invalid_fraction"] for values in metrics.values()} == {0.0}
