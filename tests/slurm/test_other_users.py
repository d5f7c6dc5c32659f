"""A run beside another ordinary user of its nodes, who took every name that could be guessed and tries every door."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.run.attempt import read_attempts
from tests.integration.training_runs import write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.neighbour import NOBODY
from tests.slurm.small_runs import SmallRun, run_of, two_node_config

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

NEIGHBOUR = Path(__file__).with_name("neighbour.py")
_FOLDERS = ("/tmp", "/dev/shm")


@dataclass(frozen=True)
class Beside:
    """What the neighbour took on each node before the run, got while it trained, and has after it."""

    run: SmallRun
    planted: dict[str, int]
    got: dict[str, dict[str, str]]
    left: dict[str, int]


@pytest.fixture(scope="module")
def beside(slurm_cluster: SlurmCluster) -> Iterator[Beside]:
    workspace = Path(tempfile.mkdtemp(prefix="project-"))
    workspace.chmod(0o755)  # not pytest's, which nobody else can enter
    write_workspace(workspace)
    config = two_node_config(workspace, "beside", 2000)
    program = workspace / "neighbour.py"
    shutil.copy(NEIGHBOUR, program)
    python = ["/usr/bin/python3", str(program)]
    probe = slurm_cluster.output(["sbatch", "--parsable", "--output=/dev/null", "--wrap=true"], environment=ENVIRONMENT)
    try:
        take = [*python, "take", probe.strip()]
        planted = {node: int(slurm_cluster.output(take, on=node)) for node in slurm_cluster.node_names}
        command = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(config), "--parsable"]
        job_id = int(slurm_cluster.output(command, environment=ENVIRONMENT, cwd=workspace))
        with SmallRun(slurm_cluster, run_of(workspace, "beside"), job_id) as run:
            run.wait_for_step(2)
            words = [*python, "try", str(run.run.path), str(job_id)]
            got = {node: json.loads(slurm_cluster.output(words, on=node)) for node in slurm_cluster.node_names}
            run.run.stop_marker.touch()
            run.wait()
            yield Beside(run, planted, got, {node: num_planted(slurm_cluster, node) for node in planted})
    finally:
        for node in slurm_cluster.node_names:
            slurm_cluster.run(
                ["find", *_FOLDERS, "-maxdepth", "1", "-user", str(NOBODY), "-exec", "rm", "-r", "{}", "+"], on=node
            )
        shutil.rmtree(workspace)


def num_planted(cluster: SlurmCluster, node: str) -> int:
    return len(cluster.output(["find", *_FOLDERS, "-maxdepth", "1", "-user", str(NOBODY)], on=node).splitlines())


def test_names_that_a_neighbour_took_deny_no_node(beside: Beside) -> None:
    (attempt,) = read_attempts(beside.run.run)
    assert (attempt.exit_kind, attempt.restarts, attempt.lost_nodes) == ("stopped", [], {})
    assert min(beside.planted.values()) > 200


def test_what_a_neighbour_planted_is_not_swept_away(beside: Beside) -> None:
    assert min(beside.left.values()) >= min(beside.planted.values())


def test_a_neighbour_gets_into_nothing(beside: Beside) -> None:
    for node, said in beside.got.items():
        print(node, said)
        assert int(said["folders seen"]) >= 2, "those of both nodes where they share /tmp"
        assert int(said["processes seen"]) >= 1
        assert {what: got for what, got in said.items() if got and not what.endswith("seen")} == {}


def test_the_run_leaves_nothing_beside_what_the_neighbour_planted(beside: Beside) -> None:
    for node in beside.got:
        command = [
            "find",
            *_FOLDERS,
            "-maxdepth",
            "1",
            "-name",
            f"hg-{beside.run.job_id}-*",
            "-not",
            "-user",
            str(NOBODY),
        ]
        assert beside.run.cluster.output(command, on=node) == ""
