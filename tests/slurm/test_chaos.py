"""What dies in a job, and what becomes of the run: nothing is done by hand afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.launch.attempt_record import read_attempts
from hpc_grpo.launch.chain_record import read_chain
from hpc_grpo.ledger import check_ledger
from hpc_grpo.metrics.state import read_state
from hpc_grpo.run_dir import RunDir
from tests.integration.training_runs import LETTERS, metrics_of, tiny_config, write_workspace

if TYPE_CHECKING:
    from conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_chain_outlives_its_test")]

ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"}
DEADLINE_S = 900.0
NUM_STEPS = 24
HEAD, WORKER = "nid001", "nid002"


def hand_in(cluster: SlurmCluster, folder: Path, *, num_nodes: int) -> RunDir:
    """A chain of ten-minute jobs; a checkpoint every two steps, each of which takes a second or more."""
    workspace = write_workspace(folder)
    config = tiny_config(
        workspace,
        "chaos",
        train={"total_steps": NUM_STEPS, "lr": 1e-3},
        rewards=[{"name": LETTERS, "args": {"delay_s": 0.2}}],
        checkpoint={"every_steps": 2},
        launch={"slurm": {"gpus_per_node": 2, "cpus_per_node": 4, "time_min": 10, "num_nodes": num_nodes}},
    )
    command = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(config), "--until-complete"]
    cluster.output(command, environment=ENVIRONMENT, cwd=workspace)  # type: ignore[arg-type]
    return RunDir(workspace / "runs" / "chaos")


def wait_for_step(cluster: SlurmCluster, run: RunDir, step: int) -> None:
    def is_there() -> bool:
        state = read_state(run)
        return state is not None and state.phase == "training" and state.step >= step

    cluster.wait_until(is_there, DEADLINE_S, f"step {step} is done")


def kill(cluster: SlurmCluster, node: str, title: str) -> None:
    """SIGKILL the one process on the node whose command line begins with `title`."""
    find = f"for p in /proc/[0-9]*; do [[ $(tr '\\0' ' ' < $p/cmdline) == {title}* ]] && echo ${{p#/proc/}}; done"
    (pid,) = cluster.run(["bash", "-c", f"{{ {find}; }} 2>/dev/null; true"], on=node).stdout.split()
    cluster.output(["kill", "-9", pid], on=node)


def wait_for_complete(cluster: SlurmCluster, run: RunDir) -> None:
    cluster.wait_until(lambda: read_chain(run).ended != "", DEADLINE_S, "the chain is over")
    for output in sorted(run.slurm_logs.glob("*.out")):
        print(output.name, output.read_text(), sep="\n")
    assert run.is_complete()
    assert check_ledger(run).is_sound
    assert list(metrics_of(run)) == list(range(1, NUM_STEPS + 1))
    assert read_chain(run).successor == ""


def test_a_driver_and_an_engine_that_are_killed_cost_no_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = hand_in(slurm_cluster, tmp_path, num_nodes=1)
    wait_for_step(slurm_cluster, run, 4)
    kill(slurm_cluster, HEAD, f"'{sys.executable} -m hpc_grpo.train'")
    slurm_cluster.wait_until(lambda: len(read_attempts(run)[0].restarts) == 1, 60.0, "the driver was started again")
    wait_for_step(slurm_cluster, run, 10)
    kill(slurm_cluster, HEAD, "ray::Engine")
    wait_for_complete(slurm_cluster, run)
    (attempt,) = read_attempts(run)
    assert attempt.exit_kind == "complete"
    (killed,) = attempt.restarts
    assert "killed by SIGKILL" in killed
    assert "An engine on" in (run.attempt(attempt.attempt, attempt.job_id) / "driver.log").read_text()


def test_a_node_that_is_lost_costs_one_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = hand_in(slurm_cluster, tmp_path, num_nodes=2)
    wait_for_step(slurm_cluster, run, 4)
    slurm_cluster.kill_node(WORKER)
    try:
        end = slurm_cluster.wait_for_job(int(read_chain(run).links[0].job_id), DEADLINE_S)
    finally:
        slurm_cluster.start_node(WORKER)
    wait_for_complete(slurm_cluster, run)
    lost, last = read_attempts(run)
    # Ray and Slurm take their time to notice, and Slurm may kill the supervisor before it has written its end: how the
    # attempt is told differs, but never as something that would end the chain.
    assert end.state in ("NODE_FAIL", "FAILED")
    assert lost.exit_kind in ("node_lost", "running", "crash")
    assert last.exit_kind == "complete"
    assert last.first_step >= 4
