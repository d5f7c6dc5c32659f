"""A run of four jobs of three minutes beside the same run in one job: half an hour on two busy cores."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import LETTERS, exported_weights, metrics_of, tiny_config, write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.scene import chain_is_over

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.usefixtures("no_chain_outlives_its_test")]

NUM_STEPS = 230
STEP_S = 2.4
"""What the rewards make a step take at least: three jobs of three minutes have no room for so many."""
DEADLINE_S = 2400.0


def submit_run(cluster: SlurmCluster, workspace: Path, name: str, time_min: int) -> RunDir:
    config = tiny_config(
        workspace,
        name,
        train={"total_steps": NUM_STEPS, "lr": 1e-3},
        rewards=[{"name": LETTERS, "args": {"delay_s": STEP_S / 6}}],
        checkpoint={"every": 20},
        launch={"slurm": {"gpus_per_node": 2, "cpus_per_node": 4, "time_min": time_min}},
    )
    offline = {**ENVIRONMENT, "WANDB_MODE": "offline", "WANDB_API_KEY": "0" * 40}
    command = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(config)]
    cluster.output(command, environment=offline, cwd=workspace)  # type: ignore[arg-type]
    return RunDir(workspace / "runs" / name)


def wait_for_the_end(cluster: SlurmCluster, run: RunDir) -> None:
    cluster.wait_until(lambda: chain_is_over(cluster, run), DEADLINE_S, f"the chain of {run.path.name} is over")


def walltime_shares(run: RunDir, attempts: list[AttemptRecord]) -> dict[int, float]:
    """By attempt: the part of its job's time that went into steps."""
    spent: dict[int, float] = defaultdict(float)
    for line in read_jsonl(run.metrics):
        spent[line["attempt"]] += line.get("time/step_s", 0.0)
    ended = {attempt.attempt: (attempt.ended_at or attempt.started_at) - attempt.started_at for attempt in attempts}
    return {number: spent[number] / ended[number] for number in ended}


def wandb_ids(run: RunDir) -> set[str]:
    return {path.name.rsplit("-", 1)[1] for path in run.path.glob("**/offline-run-*")}


def test_four_links_give_what_one_job_gives(slurm_cluster: SlurmCluster, tmp_path: Path, show: Any) -> None:
    workspace = write_workspace(tmp_path)
    chained = submit_run(slurm_cluster, workspace, "chained", time_min=3)
    wait_for_the_end(slurm_cluster, chained)
    whole = submit_run(slurm_cluster, workspace, "whole", time_min=20)
    wait_for_the_end(slurm_cluster, whole)
    assert chained.is_complete()
    assert whole.is_complete()
    attempts = read_attempts(chained)
    lines = [line["step"] for line in read_jsonl(chained.metrics)]
    for attempt, share in walltime_shares(chained, attempts).items():
        steps = [line["step"] for line in read_jsonl(chained.ledger) if line["attempt"] == attempt]
        span = f"steps {steps[0]} to {steps[-1]}" if steps else "no step"
        show(f"link {attempt}: {span}, {share:.0%} of its walltime in steps")
    show(f"one job: {walltime_shares(whole, read_attempts(whole))[1]:.0%} of its walltime in steps")
    show(f"ledger: {check_ledger(chained)}; lines in metrics.jsonl: {len(lines)}; W&B ids: {wandb_ids(chained)}")
    assert len(attempts) >= 4
    assert lines == list(metrics_of(chained)) == list(range(1, NUM_STEPS + 1))
    assert check_ledger(chained).is_sound
    assert len(wandb_ids(chained)) == 1
    assert read_chain(chained).successor == ""
    ours, theirs = exported_weights(chained), exported_weights(whole)
    differing = [name for name in theirs if not np.array_equal(ours[name], theirs[name])]
    show(f"weights that differ from the run in one job: {differing or 'none, bit for bit'}")
    assert differing == []
