"""A run whose nodes are wanted for another job: it is saved in the grace time, and its chain carries on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain
from tests.slurm.scene import URGENT, Outcome, Scene

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.long,
    pytest.mark.usefixtures("no_chain_outlives_its_test", "signals_reach_tasks_alone"),
]

NUM_STEPS = 16


def scene(cluster: SlurmCluster, folder: Path, partition: str) -> Scene:
    """A run that would save at its end alone, so that every step it takes is to lose."""
    return Scene.submit_run(
        cluster,
        folder,
        num_nodes=1,
        train={"total_steps": NUM_STEPS, "lr": 1e-3},
        checkpoint={"every": None},
        slurm={"partition": partition, "cpus_per_node": 8},
    )


@pytest.mark.parametrize(
    ("partition", "is_requeued"),
    [
        pytest.param("cancelled", False, id="cancel"),
        pytest.param("requeued", False, id="requeue"),
        pytest.param("requeued", True, id="requeue of a job that may be"),
    ],
)
def test_a_preempted_run_loses_no_step(
    slurm_cluster: SlurmCluster,
    tmp_path: Path,
    record: Callable[[Outcome], None],
    partition: str,
    is_requeued: bool,
) -> None:
    run = scene(slurm_cluster, tmp_path, partition)
    if is_requeued:  # as a site's plugin would have it
        slurm_cluster.output(["scontrol", "update", f"JobId={run.jobs[0]}", "Requeue=1"])
    urgent: list[str] = []
    run.strike(lambda: urgent.append(slurm_cluster.output(URGENT, cwd=tmp_path).strip()))
    outcome = run.see_it_through()
    record(outcome)
    first, second = read_attempts(run.run)
    assert first.why.startswith("The queue preempts this job"), outcome.told
    assert (first.exit_kind, second.exit_kind) == ("resumable", "complete")
    assert second.job_id in [link.job_id for link in read_chain(run.run).links[1:]]
    assert outcome.lost_steps == 0
    assert slurm_cluster.wait_for_job(int(urgent[0]), 60.0).state == "COMPLETED"


def test_a_job_that_the_queue_starts_again_goes_on_in_one_chain(
    slurm_cluster: SlurmCluster, tmp_path: Path, record: Callable[[Outcome], None]
) -> None:
    run = scene(slurm_cluster, tmp_path, "requeued")
    slurm_cluster.output(["scontrol", "update", f"JobId={run.jobs[0]}", "Requeue=1"])
    run.strike(lambda: slurm_cluster.output(["scontrol", "requeue", run.jobs[0]]))
    outcome = run.see_it_through()
    record(outcome)
    attempts = read_attempts(run.run)
    assert [attempt.job_id for attempt in attempts] == [run.jobs[0]] * 2
    assert attempts[-1].exit_kind == "complete"
    assert len(run.jobs) == 3, "the two jobs that waited when it was started again wait for it still"
