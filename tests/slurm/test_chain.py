"""A run that needs more walltime than a job has: its jobs follow each other until it is complete."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.lock import read_lock_owner
from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import LETTERS, PAUSING, metrics_of, tiny_config, write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.scene import STAND_IN_CONFIG, URGENT, chain_is_over
from tests.stand_ins.pausing import GO, WAITS

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("no_chain_outlives_its_test")]

REPOSITORY = Path(__file__).resolve().parents[2]
SBATCH = str(REPOSITORY / "sbatch" / "grpo_rlzero.sbatch")
STAND_IN = str(REPOSITORY / "tests" / "stand_ins" / "driver.py")
DEADLINE_S = 1200.0
NUM_STEPS = 8
LEFT_S = 75.0
"""Time that the site leaves the second job at least: the driver waits, and Slurm warns it within 30 s."""


def hpc_grpo(cluster: SlurmCluster, cwd: Path, *words: str) -> str:
    return cluster.output([sys.executable, "-m", "hpc_grpo.cli", *words], environment=ENVIRONMENT, cwd=cwd)  # type: ignore[arg-type]


def wait_for_the_end(cluster: SlurmCluster, run: RunDir, deadline_s: float = DEADLINE_S) -> None:
    """Until the chain has ended and none of its jobs is left."""
    cluster.wait_until(lambda: chain_is_over(cluster, run), deadline_s, f"the chain of {run.path.name} is over")
    for output in sorted(run.slurm_logs.glob("*.out")):
        print(output.name, output.read_text(), sep="\n")


def stand_in(cluster: SlurmCluster, tmp_path: Path, environment: dict[str, str], *words: str) -> RunDir:
    """Hand in a run of the stand-in driver, which saves no checkpoint; the commands differ in `words`."""
    config = [*STAND_IN_CONFIG, f"run.root={tmp_path}", "launch.slurm.cpus_per_node=2", "--partition", "workq"]
    options = ["--driver", STAND_IN, "--time", "5", *words]
    command = [sys.executable, "-m", "hpc_grpo.cli", "submit", *config, *options]
    cluster.output(command, environment={**ENVIRONMENT, **environment}, cwd=tmp_path)  # type: ignore[arg-type]
    return RunDir(tmp_path / "debug")


def wait_for_driver(cluster: SlurmCluster, run: RunDir) -> None:
    ready = run.path / "stand_in.json"
    cluster.wait_until(ready.exists, DEADLINE_S, "the driver runs")


@pytest.mark.usefixtures("signals_reach_tasks_alone")
def test_training_goes_on_from_job_to_job(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Another job preempts the first one, and the site shortens the second.

    It would save at its end alone. The last step waits for the test, so that any machine is fast enough.
    """
    workspace = write_workspace(tmp_path)
    config = tiny_config(
        workspace,
        "long",
        train={"total_steps": NUM_STEPS, "lr": 1e-3},
        rewards=[{"name": LETTERS, "args": {"delay_s": 0.2}}],
        checkpoint={"every": None},
        launch={"slurm": {"gpus_per_node": 2, "cpus_per_node": 8, "time_min": 60, "partition": "cancelled"}},
    )
    hpc_grpo(slurm_cluster, workspace, "submit", str(config), "--driver", PAUSING)
    run = RunDir(workspace / "runs" / "long")
    slurm_cluster.wait_until(lambda: len(list(read_jsonl(run.ledger))) >= 2, DEADLINE_S, "two steps are done")
    urgent = int(slurm_cluster.output(URGENT, cwd=tmp_path))
    slurm_cluster.wait_until(lambda: pauses(run, attempt=2), DEADLINE_S, "the second job has one step left")
    second = read_attempts(run)[1]
    minutes = math.ceil((time.time() - second.started_at + LEFT_S) / 60)
    slurm_cluster.output(["scontrol", "update", f"JobId={second.job_id}", f"TimeLimit={minutes}"])
    slurm_cluster.wait_until(lambda: read_attempts(run)[1].ended_at is not None, DEADLINE_S, "the second job is over")
    (run.path / GO).touch()
    wait_for_the_end(slurm_cluster, run)
    assert run.is_complete()
    assert check_ledger(run).is_sound
    assert list(metrics_of(run)) == list(range(1, NUM_STEPS + 1))
    attempts = read_attempts(run)
    assert [attempt.exit_kind for attempt in attempts] == ["resumable", "resumable", "complete"]
    assert attempts[0].why.startswith("The queue preempts this job")
    assert len(list(read_jsonl(run.ledger))) == NUM_STEPS, "both jobs left in time: no step was trained twice"
    chain = read_chain(run)
    assert [link.successor_of for link in chain.links[1:]] == [link.job_id for link in chain.links[:-1]]
    assert chain.successor == ""
    assert slurm_cluster.wait_for_job(urgent, 60.0).state == "COMPLETED"
    logs = "".join(path.read_text() for path in run.attempts.glob("3-*/nodes/*/agent.log"))
    assert "did not end within" not in logs, "Ray waited for its node to drain"


def pauses(run: RunDir, attempt: int) -> bool:
    """Tell whether the driver of this attempt waits before its last step."""
    owner = read_lock_owner(run)
    return owner is not None and (owner.attempt, owner.work) == (attempt, WAITS)


def test_a_bug_ends_the_chain_in_words(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """By sbatch: the follow-on jobs ask for what the first was given on the command line."""
    settings = ["launch.max_stalled_attempts=2", "launch.slurm.extra.gres=gpu:1"]
    given = ["sbatch", "--parsable", "--time=4", "--cpus-per-task=2", "--gpus-per-node=2", "--comment=mine"]
    argv = [*given, SBATCH, "local/debug", f"run.root={tmp_path}", *settings, "--driver", STAND_IN]
    told = tmp_path / "told"
    argv.append(f"launch.notify=[bash,-c,'echo $HPC_GRPO_EVENT $HPC_GRPO_RUN: $HPC_GRPO_WHY >> {told}']")
    crash = {**ENVIRONMENT, "HPC_GRPO_STAND_IN_EXIT": "1"}
    done = slurm_cluster.run(argv, environment=crash, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = RunDir(tmp_path / "debug")
    wait_for_the_end(slurm_cluster, run)
    attempts = read_attempts(run)
    assert [attempt.exit_kind for attempt in attempts] == ["crash", "crash"]
    assert [attempt.num_gpus for attempt in attempts] == [2, 2]
    assert [len(attempt.restarts) for attempt in attempts] == [1, 1]
    assert all(attempt.ends_at is not None and attempt.ends_at - attempt.started_at <= 240 for attempt in attempts)
    chain = read_chain(run)
    assert chain.slurm["extra"] == {"exclusive": True, "comment": "mine"}
    jobs = [link.job_id for link in chain.links]
    assert [link.successor_of for link in chain.links] == ["", *jobs[:-1]]
    assert "No new checkpoint in 2 attempts" in chain.ended
    *retrying, end = told.read_text().splitlines()
    assert [line.startswith(f"retrying {run.path}: The driver crashed") for line in retrying] == [True, True]
    assert end == f"ended {run.path}: {chain.ended}"


def test_a_bad_node_at_a_link_does_not_end_the_chain(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """The second job dies in its set-up lines, before hpc-grpo runs in it; the third completes the run."""
    logs = RunDir(tmp_path / "debug").slurm_logs
    number = f"number=$(ls {logs}/*.began | wc -l)"
    ends = "export HPC_GRPO_STAND_IN_EXIT=$((number < 3 ? 75 : 0)); [[ $number != 2 ]] || exit 1"
    run = stand_in(slurm_cluster, tmp_path, {}, f"launch.setup_lines=['{number}; {ends}']")
    slurm_cluster.wait_until(run.is_complete, DEADLINE_S, "the run is complete")
    wait_for_the_end(slurm_cluster, run)
    chain = read_chain(run)
    jobs = [link.job_id for link in chain.links]
    assert [link.successor_of for link in chain.links] == ["", *jobs[:-1]]
    first, bad, third = jobs[:3]
    assert [attempt.job_id for attempt in read_attempts(run)] == [first, third]
    assert run.job_mark(bad).exists()
    assert chain.ended == "The run is complete."


def test_a_job_cancelled_by_hand_ends_the_chain(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = stand_in(slurm_cluster, tmp_path, {"HPC_GRPO_STAND_IN_SLEEP_S": "200"})
    wait_for_driver(slurm_cluster, run)
    first = read_chain(run).links[0].job_id
    slurm_cluster.output(["scancel", first])
    wait_for_the_end(slurm_cluster, run)
    assert "cancelled by the user" in read_chain(run).ended
    assert len(read_attempts(run)) == 1


def test_cancel_ends_everything_and_resume_takes_it_up(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = stand_in(slurm_cluster, tmp_path, {"HPC_GRPO_STAND_IN_SLEEP_S": "200"})
    wait_for_driver(slurm_cluster, run)
    jobs = [link.job_id for link in read_chain(run).links]
    assert len(jobs) == 3
    for _ in range(2):  # a second time does no harm
        assert jobs[0] in hpc_grpo(slurm_cluster, tmp_path, "stop", "--now", str(run.path))
    queued = lambda: slurm_cluster.run(["squeue", "-h", "-j", ",".join(jobs)]).stdout.strip()  # noqa: E731
    slurm_cluster.wait_until(lambda: not queued(), 60.0, "no job is left")
    assert run.stop_marker.exists()
    resume = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(run.path), "--driver", STAND_IN]
    resumed = lambda: slurm_cluster.run(resume, environment=ENVIRONMENT, cwd=tmp_path).returncode == 0  # noqa: E731
    slurm_cluster.wait_until(resumed, DEADLINE_S, "Slurm says that the job is over, and the run is resumed")
    slurm_cluster.wait_until(run.is_complete, DEADLINE_S, "the run is complete")
    wait_for_the_end(slurm_cluster, run)
    assert not run.stop_marker.exists()
    assert read_chain(run).successor == ""


@pytest.mark.long
def test_where_jobs_cannot_submit_all_links_are_queued_at_once(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    config = [
        *STAND_IN_CONFIG,
        f"run.root={tmp_path}",
        "launch.slurm.cpus_per_node=2",
        "launch.slurm.jobs_can_submit=false",
    ]
    command = [sys.executable, "-m", "hpc_grpo.cli", "submit", *config, "--driver", STAND_IN, "--time", "5"]
    exits = {**ENVIRONMENT, "HPC_GRPO_STAND_IN_EXIT": "75"}
    slurm_cluster.output([*command, "--chain", "2"], environment=exits, cwd=tmp_path)  # type: ignore[arg-type]
    run = RunDir(tmp_path / "debug")
    jobs = [link.job_id for link in read_chain(run).links]
    assert [link.successor_of for link in read_chain(run).links] == ["", *jobs[:2]]
    queued = lambda: slurm_cluster.run(["squeue", "-h", "-j", ",".join(jobs)]).stdout.strip()  # noqa: E731
    slurm_cluster.wait_until(lambda: not queued(), DEADLINE_S, "all three jobs have run")
    assert [attempt.job_id for attempt in read_attempts(run)] == jobs
    assert [link.job_id for link in read_chain(run).links] == jobs
