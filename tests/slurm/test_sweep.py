"""A sweep on the cluster: an array of runs, each of which survives what happens to its nodes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.cli.options import runs_below
from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from tests.integration.training_runs import LETTERS, tiny_config, write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.scene import DEADLINE_S, STAND_IN_CONFIG, chain_is_over

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_chain_outlives_its_test")]

NUM_STEPS = 8
KILLED = "nid002"


def hpc_grpo(cluster: SlurmCluster, folder: Path, *words: str) -> str:
    return cluster.output([sys.executable, "-m", "hpc_grpo.cli", *words], environment=ENVIRONMENT, cwd=folder)  # type: ignore[arg-type]


def wait_for_all(cluster: SlurmCluster, runs: list[RunDir]) -> None:
    for run in runs:
        cluster.wait_until(lambda run=run: chain_is_over(cluster, run), 2 * DEADLINE_S, f"{run.path.name} is over")  # type: ignore[misc]


def wait_for_record(cluster: SlurmCluster, job: str, state: str) -> None:
    """Wait until Slurm's accounting says how a job ended: it lags behind the queue."""
    sacct = ["sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job]
    cluster.wait_until(lambda: cluster.output(sacct).startswith(state), DEADLINE_S, f"job {job} ended as {state}")


def test_each_task_is_the_first_job_of_its_run(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Of runs that need no training: one is complete, and one was stopped while its task waited."""
    until = f"--wrap=until [ -e {tmp_path / 'go'} ]; do sleep 0.2; done"
    before = slurm_cluster.output(["sbatch", "--parsable", "--output=/dev/null", until], cwd=tmp_path).strip()
    words = [*STAND_IN_CONFIG, f"run.root={tmp_path}", "launch.slurm.cpus_per_node=2", "--time", "5"]
    array = hpc_grpo(slurm_cluster, tmp_path, "submit", *words, "--seeds", "2", "--after", before, "--parsable").strip()
    runs = runs_below(tmp_path / "debug")
    assert [run.path.name for run in runs] == ["seed-0", "seed-1"]
    listed = ["squeue", "-h", "--array", "-o", "%i %E", "-j", array]
    waiting = sorted(slurm_cluster.output(listed).splitlines())
    assert waiting == [f"{array}_{task} afterany:{before}(unfulfilled)" for task in (0, 1)]
    runs[0].complete_marker.touch()
    runs[1].stop_marker.touch()
    (tmp_path / "go").touch()
    wait_for_all(slurm_cluster, runs)
    ends = {0: ("COMPLETED|0:0", "The run is complete."), 1: ("FAILED|75:0", "The STOP file asks the run to end")}
    for task, run in enumerate(runs):
        own, first, second = [link.job_id for link in read_chain(run).links]
        assert own == f"{array}_{task}"
        state, why = ends[task]
        wait_for_record(slurm_cluster, own, state)
        assert run.job_mark(own).is_file()
        assert run.slurm_log(own).read_text().startswith(why)
        assert read_chain(run).ended.startswith(why)
        for follower in (first, second):
            wait_for_record(slurm_cluster, follower, "CANCELLED")


@pytest.mark.long
def test_a_sweep_of_which_a_node_is_killed_completes_all_runs(
    slurm_cluster: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = write_workspace(tmp_path)
    config = tiny_config(
        workspace,
        "sweep",
        train={"total_steps": NUM_STEPS},
        rewards=[{"name": LETTERS, "args": {"delay_s": 0.2}}],
        launch={"slurm": {"gpus_per_node": 2, "cpus_per_node": 8, "time_min": 10}},
    )
    submitted = hpc_grpo(
        slurm_cluster, workspace, "submit", str(config), "--sweep", "train.lr=1e-3,5e-3", "--seeds", "3"
    )
    runs = runs_below(workspace / "runs" / "sweep")
    assert len(runs) == 6

    def trains_there() -> bool:
        return any(
            (state := read_state(run)) is not None
            and (state.phase, state.step >= 2) == ("training", True)
            and read_attempts(run)[-1].nodes == [KILLED]
            for run in runs
        )

    slurm_cluster.wait_until(trains_there, DEADLINE_S, f"a run trains on {KILLED}")
    slurm_cluster.kill_node(KILLED)
    slurm_cluster.start_node(KILLED)
    wait_for_all(slurm_cluster, runs)
    status = hpc_grpo(slurm_cluster, workspace, "status", str(workspace / "runs" / "sweep"))
    results = hpc_grpo(slurm_cluster, workspace, "compare", str(workspace / "runs" / "sweep"))
    with capsys.disabled():
        print(f"\n{submitted}\n{status}\n{results}")
    assert all(run.is_complete() and check_ledger(run).is_sound for run in runs)
    attempts = [read_attempts(run) for run in runs]
    assert sorted(map(len, attempts)) == [1, 1, 1, 1, 1, 2], "the killed node costs one run an attempt"
    (struck,) = (own for own in attempts if len(own) == 2)
    assert struck[0].nodes == [KILLED]
    assert [line.split()[1] for line in results.splitlines()[1:3]] == ["3/3", "3/3"]
