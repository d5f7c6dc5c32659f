"""Steps that Slurm holds to their cores, as most sites have it: shells and what runs in them get all of a node's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import (
    CLUSTER_UP_DEADLINE_S,
    ENVIRONMENT,
    EX_UNAVAILABLE,
    REPOSITORY,
    SlurmCluster,
    virtual_slurm,
)
from tests.slurm.terminal import Terminal
from tools.virtual_slurm.layout import Layout

pytestmark = pytest.mark.slurm

SBATCH = str(REPOSITORY / "sbatch" / "run_on_compute.sbatch")
CORES = 2
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def constrained() -> Iterator[SlurmCluster]:
    """A cluster of its own beside the others' one: two real cores a node, which steps share only if they ask for it."""
    if len(os.sched_getaffinity(0)) < CORES:
        pytest.skip(f"this machine has fewer than {CORES} cores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(Layout.state_variable, f"{Layout.from_environment().state}-cores")
        up = ["up", "--nodes", "2", "--cpus-per-node", str(CORES), "--constrain-cores"]
        done = virtual_slurm(up, CLUSTER_UP_DEADLINE_S)
        if done.returncode == EX_UNAVAILABLE:  # this kernel has no cgroups of the first version, or none to write
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        try:
            yield SlurmCluster()
        finally:
            down = virtual_slurm(["down"], CLUSTER_UP_DEADLINE_S)
            assert down.returncode == 0, down.stderr


def cores_of(argv: list[str], folder: Path) -> int:
    """The cores that a program may use which is started in a shell."""
    with Terminal(argv, ENVIRONMENT, REPOSITORY, folder) as terminal:
        terminal.await_prompt(DEADLINE_S)
        return int(terminal.ask("echo it may use $(nproc)", r"^it may use (\d+)$", DEADLINE_S)[1])


@pytest.mark.parametrize("asked", [["--cpus-per-node=2"], ["--sbatch=exclusive"]])
def test_a_shell_has_all_cores_of_its_allocation(constrained: SlurmCluster, tmp_path: Path, asked: list[str]) -> None:
    shell = [
        sys.executable,
        "-m",
        "hpc_grpo.cli",
        "cluster",
        "shell",
        "--nodes=2",
        "--time=5",
        "--gpus-per-node=0",
        *asked,
    ]
    assert cores_of(shell, tmp_path) == CORES


def test_a_shell_beside_a_job_has_all_cores_of_it(constrained: SlurmCluster, tmp_path: Path) -> None:
    argv = ["sbatch", "--parsable", "--cpus-per-task=2", "--gpus-per-node=0", "--time=5", SBATCH]
    job_id = int(constrained.output(argv, cwd=tmp_path))
    output = tmp_path / f"run_on_compute-{job_id}.out"
    constrained.wait_until(lambda: output.exists() and "--pty" in output.read_text(), DEADLINE_S, "nodes are held")
    (attach,) = [line.strip() for line in output.read_text().splitlines() if "--pty" in line]
    try:
        assert cores_of(attach.split(), tmp_path) == CORES
    finally:
        constrained.run(["scancel", str(job_id)])
