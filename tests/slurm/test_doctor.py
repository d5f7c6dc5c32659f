"""The doctor on a real cluster: from the login node in a job of its own, and inside an allocation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_grpo.preflight.folders import free_gib
from tests.slurm.conftest import ENVIRONMENT
from tests.support.model_folders import make_model

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

DOCTOR = [sys.executable, "-m", "hpc_grpo.cli", "cluster", "doctor", "virtual_slurm/debug", "--json"]
DEADLINE_S = 240.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with what the config names; the doctor reads the first row, and no weights."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    make_model(tmp_path / "demo/model", {"model_type": "llama", "vocab_size": 1000, **shape})
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / "demo" / name).write_text('{"question": "1+1=", "answer": "2"}\n')
    return tmp_path


def run(
    cluster: SlurmCluster, place: Path, *words: str, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    argv = [*before, *DOCTOR, f"run.root={place}/runs", *words]
    return cluster.run(argv, environment=ENVIRONMENT, cwd=place, deadline_s=DEADLINE_S)


def findings(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_two_nodes_are_examined_in_a_short_job(slurm_cluster: SlurmCluster, place: Path) -> None:
    done = run(slurm_cluster, place, "--nodes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = findings(done)
    is_nearly_full = free_gib(place) < 20  # which the doctor warns of
    assert found.pop("run folder")["status"] == ("warning" if is_nearly_full else "ok")
    assert [check for check, finding in found.items() if finding["status"] in ("warning", "failure")] == []
    assert found["partition"]["says"] == "workq is up: 2 nodes, 8 GPUs"
    assert found["answers"]["says"] == "nid001, nid002"
    assert found["interface"]["says"] == "nid001: eth0 has 198.18.0.11; nid002: eth0 has 198.18.0.12"
    assert found["canary"]["says"] == "a file written by nid001 is read by nid002"
    assert found["versions"]["says"].startswith("equal on both nodes: ")
    assert found["gloo"]["says"].endswith(" GB/s between 2 nodes")
    assert found["nccl library"]["says"] == "none: this torch is built without NCCL"
    assert not (place / "runs" / ".doctor").exists()


def test_a_wrong_interface_is_found_with_those_that_exist(slurm_cluster: SlurmCluster, place: Path) -> None:
    done = run(slurm_cluster, place, "--nodes", "2", "launch.interface=hsn9")
    assert done.returncode == 78, done.stdout + done.stderr
    found = findings(done)
    assert found["interface"]["status"] == "failure"
    for node, address in zip(slurm_cluster.node_names, ("198.18.0.11", "198.18.0.12"), strict=True):
        assert (
            f"{node} has no such interface with an IPv4 address. It has: eth0 ({address})"
            in (found["interface"]["says"])
        )
    assert "launch.interface" in found["interface"]["fix"]
    assert found["gloo"]["status"] == "skipped"


def test_a_partition_that_does_not_exist_costs_no_job(slurm_cluster: SlurmCluster, place: Path) -> None:
    done = run(slurm_cluster, place, "--nodes", "2", "launch.slurm.partition=nope")
    assert done.returncode == 78, done.stdout + done.stderr
    found = findings(done)
    assert found["partition"]["says"] == "there is no partition nope"
    assert (
        found["partition"]["fix"]
        == "set launch.slurm.partition to one of: workq, nodefmem, urgent, requeued, cancelled"
    )
    assert "Job" not in done.stderr
    assert not (place / "runs").exists()


def test_an_account_that_is_not_yours_is_told_yours(slurm_cluster: SlurmCluster, place: Path) -> None:
    done = run(slurm_cluster, place, "launch.slurm.account=nope")
    assert done.returncode == 78
    assert findings(done)["account"]["fix"] == "set launch.slurm.account to one of: root"


def test_a_job_that_fails_before_python_is_not_waited_for(slurm_cluster: SlurmCluster, place: Path) -> None:
    done = run(slurm_cluster, place, "--nodes", "1", "launch.setup_lines=[echo no such module; exit 3]")
    assert done.returncode == 78
    assert "ended without findings: no such module" in findings(done)["job"]["says"]


def test_a_job_that_waits_too_long_is_called_off(slurm_cluster: SlurmCluster, place: Path) -> None:
    done = run(slurm_cluster, place, "--nodes", "1", "--wait-min", "0.05", "launch.slurm.extra.begin=now+1hour")
    job_id = done.stderr.split()[1]
    assert done.returncode == 78
    assert f"Job {job_id} was cancelled." in findings(done)["job"]["says"]
    assert slurm_cluster.wait_for_job(int(job_id), 30.0).state == "CANCELLED"


def test_an_allocation_is_examined_at_once_and_a_folder_of_one_node_is_found(
    slurm_cluster: SlurmCluster, place: Path
) -> None:
    allocate = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "--time=5")
    # /dev/shm is another one on each node.
    done = run(slurm_cluster, place, "run.root=/dev/shm", before=allocate)
    assert done.returncode == 78, done.stdout + done.stderr
    found = findings(done)
    assert [check for check, finding in found.items() if finding["status"] == "failure"] == ["canary"]
    assert found["canary"]["says"] == "nid002 cannot read what nid001 wrote in /dev/shm"
    assert found["run folder"]["status"] == "warning"
    assert found["gloo"]["says"].endswith(" GB/s between 2 nodes")
    for machine in (*slurm_cluster.node_names, "login01"):
        assert slurm_cluster.run(["ls", "-d", "/dev/shm/.doctor"], on=machine).returncode != 0


def test_more_nodes_than_the_allocation_has_are_refused(slurm_cluster: SlurmCluster, place: Path) -> None:
    allocate = ("salloc", "--quiet", "--nodes=1", "--time=5")
    done = run(slurm_cluster, place, "--nodes", "2", before=allocate)
    assert done.returncode == 78
    assert "--nodes 2: job" in done.stderr
    assert "has 1 nodes" in done.stderr
