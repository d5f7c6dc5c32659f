"""Working by hand in an allocation: Ctrl+C ends a run with a checkpoint, and the nodes stay usable."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import LETTERS, PAUSING, tiny_config, write_workspace
from tests.slurm.conftest import ENVIRONMENT, REPOSITORY
from tests.slurm.terminal import CTRL_C, Terminal
from tests.slurm.test_launch import left_behind

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

SBATCH = str(REPOSITORY / "sbatch" / "run_on_compute.sbatch")
HPC_GRPO = f"{sys.executable} -m hpc_grpo.cli"
_SHELL_DEADLINE_S = 60.0
_RUN_DEADLINE_S = 420.0


def make_run(folder: Path, delay_s: float) -> RunDir:
    """A run on two nodes, to be started with `by-hand.yaml` in `folder`; each prompt's reward takes `delay_s`."""
    config = tiny_config(
        write_workspace(folder),
        "by-hand",
        rewards=[{"name": LETTERS, "timeout_s": 60, "args": {"delay_s": delay_s}}],
        train={"total_steps": 6, "lr": 1e-3, "zero_stage": 1},
        checkpoint={"every": None},
    )
    return RunDir(config.parent / "runs" / "by-hand")


@pytest.fixture
def held_nodes(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The command that run_on_compute.sbatch prints for a shell on its first node, and its job."""
    argv = ["sbatch", "--parsable", "--nodes=2", "--cpus-per-task=4", "--time=20", SBATCH]
    job_id = int(slurm_cluster.output(argv, cwd=tmp_path))
    output = tmp_path / f"run_on_compute-{job_id}.out"
    try:
        slurm_cluster.wait_until(lambda: output.exists() and "--pty" in output.read_text(), 60.0, "nodes are held")
        (line,) = [line.strip() for line in output.read_text().splitlines() if "--pty" in line]
        yield line, job_id
    finally:
        slurm_cluster.run(["scancel", str(job_id)])


def wait_for_step(cluster: SlurmCluster, run: RunDir, step: int, terminal: Terminal) -> None:
    def recorded() -> bool:
        assert not re.search(r"^it ended with \d", terminal.text, re.MULTILINE), terminal.text
        return any(line["step"] >= step for line in read_jsonl(run.ledger))

    cluster.wait_until(recorded, _RUN_DEADLINE_S, f"step {step} of {run.path.name}")


def assert_nothing_left(cluster: SlurmCluster, job_id: int) -> None:
    cluster.wait_until(lambda: not left_behind(cluster, job_id), 30.0, "nothing of the run is left on the nodes")


def test_ctrl_c_checkpoints_and_the_nodes_stay_usable(
    slurm_cluster: SlurmCluster, held_nodes: tuple[str, int], tmp_path: Path
) -> None:
    run = make_run(tmp_path, delay_s=0.25)
    attach, job_id = held_nodes
    command = f"{HPC_GRPO} train by-hand.yaml"
    with Terminal(attach.split(), ENVIRONMENT, REPOSITORY, tmp_path) as terminal:
        terminal.await_prompt(_SHELL_DEADLINE_S)
        terminal.type(f"cd {tmp_path}; {command} --driver {PAUSING}; echo it ended with $?")
        wait_for_step(slurm_cluster, run, 2, terminal)
        assert left_behind(slurm_cluster, job_id)
        terminal.press(CTRL_C)
        assert terminal.expect(r"^it ended with (\d+)$", _RUN_DEADLINE_S)[1] == "75"
        stopped = read_attempts(run)[-1]
        assert (stopped.exit_kind, stopped.nodes) == ("resumable", ["nid001", "nid002"])
        checkpoint = next(valid_checkpoints(run), None)
        assert checkpoint is not None
        assert checkpoint.step == max(line["step"] for line in read_jsonl(run.ledger))
        assert not run.is_complete()
        assert_nothing_left(slurm_cluster, job_id)

        terminal.type(f"{command}; echo it ended with $?")
        assert terminal.expect(r"^it ended with (\d+)$", _RUN_DEADLINE_S)[1] == "0"
    assert run.is_complete()
    assert check_ledger(run).is_sound
    resumed = read_attempts(run)[-1]
    assert (resumed.job_id, resumed.first_step) == (str(job_id), checkpoint.step)
    assert_nothing_left(slurm_cluster, job_id)


@pytest.mark.long
def test_an_eval_in_the_login_nodes_shell_of_an_allocation_prints_its_answer(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """salloc leaves the shell where it is: the eval is a child of it on the head node, with an engine on each node."""
    config = tiny_config(write_workspace(tmp_path), "judged", eval={"reward": LETTERS})
    eval_command = f"{HPC_GRPO} model eval tied --config {config} --data eval.jsonl --out {tmp_path}/result.json"
    salloc = ["salloc", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4", "--time=10"]
    words = [*salloc, "bash", "-c", eval_command]
    done = slurm_cluster.run(words, cwd=tmp_path, deadline_s=_RUN_DEADLINE_S, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    title, line = done.stdout.splitlines()
    assert title.split()[:3] == ["MODEL", "DATA", "PASS@1"]
    assert line.split()[:2] == ["tied", "all"]
    (attempt,) = read_attempts(RunDir(next((tmp_path / "runs" / "evals").iterdir())))
    assert attempt.nodes == ["nid001", "nid002"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(list(read_jsonl(Path(result["models"]["tied"]["completions"]) / "eval.jsonl"))) == 8


@pytest.mark.long
def test_shells_on_nodes_and_a_second_ctrl_c(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    run = make_run(tmp_path, delay_s=5.0)  # a step takes 15 s at least
    options = ["--nodes=2", "--time=20", "--gpus-per-node=4", "--cpus-per-node=4"]
    shell = [*HPC_GRPO.split(), "cluster", "shell"]
    with Terminal([*shell, *options], ENVIRONMENT, REPOSITORY, tmp_path) as terminal:
        terminal.await_prompt(_SHELL_DEADLINE_S)
        terminal.type("echo on $(hostname) in job $SLURM_JOB_ID")
        on = terminal.expect(r"^on (\w+) in job (\d+)$", _SHELL_DEADLINE_S)
        assert on[1] == "nid001"
        terminal.type(f"{HPC_GRPO} train by-hand.yaml; echo it ended with $?")
        wait_for_step(slurm_cluster, run, 1, terminal)
        with Terminal([*shell, str(run.path), "--node=nid002"], ENVIRONMENT, REPOSITORY, tmp_path) as second:
            second.await_prompt(_SHELL_DEADLINE_S)
            second.type("echo on $(hostname) in job $SLURM_JOB_ID")
            assert second.expect(r"^on (\w+) in job (\d+)$", _SHELL_DEADLINE_S).groups() == ("nid002", on[2])
        wait_for_step(slurm_cluster, run, 2, terminal)
        terminal.press(CTRL_C)
        time.sleep(1.0)  # two in one breath are one
        terminal.press(CTRL_C)
        assert terminal.expect(r"^it ended with (\d+)$", 60.0)[1] == "1"
        assert read_attempts(run)[-1].exit_kind == "cancelled"
        assert_nothing_left(slurm_cluster, int(on[2]))
    left = slurm_cluster.output(["squeue", "-h", "-o", "%T", "--jobs", on[2], "--states=all"])
    assert re.fullmatch("COMPLETED|COMPLETING|FAILED", left.strip())
