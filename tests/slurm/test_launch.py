"""Launching on a real cluster: two nodes come up as one Ray, training sees what it should, nothing is left."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.slurm.scene import STAND_IN_CONFIG

if TYPE_CHECKING:
    from tests.slurm.conftest import JobEnd, SlurmCluster

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).resolve().parents[2]
SBATCH = str(REPOSITORY / "sbatch" / "grpo_rlzero.sbatch")
DRIVER = ["--driver", str(REPOSITORY / "tests" / "stand_ins" / "driver.py")]
ENVIRONMENT = {
    # hpc-grpo of the Python that runs the tests, also where no virtual environment is active
    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
    "PYTHONPATH": "/not/for/ray",
    "http_proxy": "http://proxy.invalid:1",
    "WANDB_API_KEY": "a-secret",
    "MINE": "let through",
    "SLURM_TIME_FORMAT": "relative",
    "OTHERS": "stays behind",
}
_DEADLINE_S = 240.0


def arguments(root: Path) -> list[str]:
    """A run of one job."""
    one_job = "launch.slurm.max_job_chains=0"
    return [*STAND_IN_CONFIG, f"run.root={root}", "launch.pass_env=[MINE]", one_job, *DRIVER]


def submit_sbatch(cluster: SlurmCluster, root: Path, driver_env: dict[str, str] | None = None) -> int:
    """sbatch the shipped script from a folder that is not the repository's."""
    argv = ["sbatch", "--parsable", "--nodes=2", "--cpus-per-task=2", "--time=5", SBATCH, *arguments(root)]
    done = cluster.run(argv, environment={**ENVIRONMENT, **(driver_env or {})}, cwd=root)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def attempt(root: Path) -> dict[str, Any]:
    (path,) = (root / "debug" / "attempts").glob("*/attempt.json")
    return dict(json.loads(path.read_text()))


def left_behind(cluster: SlurmCluster, job_id: int) -> list[str]:
    """Processes, listening ports and folders of the job on its nodes."""
    name = f"[h]g-{job_id}-"  # brackets, so that the search does not find itself
    look = (
        f"grep -lsz '{name}' /proc/[0-9]*/cmdline; ls -d /dev/shm/{name}* /tmp/{name}*;"
        "ss -ltnH | awk '{print $4}' | grep -E ':(1[0-9]|2[0-9]|3[0-2])[0-9]{3}$'"
    )
    found = [cluster.run(["bash", "-c", f"{{ {look}; }} 2>/dev/null"], on=node) for node in cluster.node_names]
    return [line for done in found for line in done.stdout.split()]


def wait(cluster: SlurmCluster, job_id: int, root: Path) -> JobEnd:
    end = cluster.wait_for_job(job_id, _DEADLINE_S)
    with contextlib.suppress(pytest.fail.Exception):
        cluster.wait_until(lambda: not left_behind(cluster, job_id), 30.0, "nothing of the job is left on the nodes")
    assert left_behind(cluster, job_id) == []
    for output in root.glob("*.out"):
        print(output.read_text())
    return end


def test_sbatch_brings_up_two_nodes_and_leaves_nothing(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    job_id = submit_sbatch(slurm_cluster, tmp_path)
    end = wait(slurm_cluster, job_id, tmp_path)
    assert (end.state, end.exit_code) == ("COMPLETED", "0:0")
    seen = json.loads((tmp_path / "debug" / "stand_in.json").read_text())
    assert seen["resources"]["GPU"] == 8
    assert seen["resources"]["CPU"] == 16  # all of both nodes: the script asks for them exclusively
    assert sorted(witness["host"] for witness in seen["witnesses"]) == list(slurm_cluster.node_names)
    for witness in seen["witnesses"]:
        env = witness["env"]
        assert env["MINE"] == "let through"
        assert "WANDB_API_KEY" in env
        assert env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
        assert env["VLLM_HOST_IP"] == witness["ip"]
        assert witness["store_mode"] == "0o700"
        assert witness["cwd"] == str(tmp_path)
        unwanted = ("SLURM", "PYTHONPATH", "http_proxy", "OTHERS", "ROCR_", "GPU_DEVICE_ORDINAL")
        assert [name for name in env if name.startswith(unwanted)] == []
    record = attempt(tmp_path)
    assert (record["exit_kind"], record["num_gpus"], record["job_id"]) == ("complete", 8, str(job_id))
    assert float(seen["contract"]["HPC_GRPO_ENDS_AT"]) == record["ends_at"]
    for node in slurm_cluster.node_names:
        logs = tmp_path / "debug" / "attempts" / f"1-{job_id}" / "nodes" / node
        assert (logs / "ray" / "raylet.out").stat().st_size > 0
    assert "a-secret" not in "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()
    )


def test_submit_hands_in_a_frozen_run_and_returns(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    """Whole nodes bring their GPUs; the partition comes from sbatch's own variable."""
    words = ["submit", *arguments(tmp_path), "--nodes", "2", "--time", "5"]
    words += ["launch.slurm.extra.exclusive=true", "launch.setup_lines=[export MINE=set]"]
    command = [sys.executable, "-m", "hpc_grpo.cli", *words]
    # A driver with more to do: its exit code 75 must become the job's.
    environment = {**ENVIRONMENT, "HPC_GRPO_STAND_IN_EXIT": "75", "SBATCH_PARTITION": "nodefmem"}
    done = slurm_cluster.run(command, environment=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job_id = int(done.stdout.split()[2])
    assert f"Submitted job {job_id} for run {tmp_path}/debug\n" in done.stdout
    end = wait(slurm_cluster, job_id, tmp_path)
    log = tmp_path / "debug" / "slurm" / f"{job_id}_0_log.out"
    assert "Ray ready on 2 nodes, 8 GPUs" in log.read_text()
    assert "stand-in: 2 nodes, 8 GPUs" in log.read_text()
    assert (end.state, end.exit_code) == ("FAILED", "75:0")
    assert attempt(tmp_path)["exit_kind"] == "resumable"
    seen = json.loads((tmp_path / "debug" / "stand_in.json").read_text())
    assert {witness["env"]["MINE"] for witness in seen["witnesses"]} == {"set"}
    had = slurm_cluster.output(["sacct", "-X", "-n", "-P", "-j", str(job_id), "-o", "Partition"])
    assert had.strip() == "nodefmem"


def test_a_lost_supervisor_leaves_no_process_and_the_next_job_removes_its_folders(
    slurm_cluster: SlurmCluster, tmp_path: Path
) -> None:
    """With its script Slurm kills the job's sruns, each of which may have its agent killed before that tidies up."""
    roots = [tmp_path / "lost", tmp_path / "next"]
    for root in roots:
        root.mkdir()
    job_id = submit_sbatch(slurm_cluster, roots[0], driver_env={"HPC_GRPO_STAND_IN_SLEEP_S": "100"})
    ready = roots[0] / "debug" / "stand_in.json"
    slurm_cluster.wait_until(ready.exists, _DEADLINE_S, "the driver runs")
    pid = str(attempt(roots[0])["supervisor_pid"])
    slurm_cluster.run(["kill", "-9", pid], on=slurm_cluster.node_names[0])
    assert slurm_cluster.wait_for_job(job_id, _DEADLINE_S).state == "FAILED"
    slurm_cluster.wait_until(
        lambda: all(line.startswith(("/dev/shm/", "/tmp/")) for line in left_behind(slurm_cluster, job_id)),
        30.0,
        "no process and no port of the job is left on the nodes",
    )
    assert wait(slurm_cluster, submit_sbatch(slurm_cluster, roots[1]), roots[1]).state == "COMPLETED"
    assert left_behind(slurm_cluster, job_id) == []


def test_a_wrong_config_fails_at_once_and_in_words(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    argv = ["sbatch", "--parsable", "--time=1", SBATCH, "local/debug", "train.lrr=1"]
    done = slurm_cluster.run(argv, environment=ENVIRONMENT, cwd=tmp_path)
    end = slurm_cluster.wait_for_job(int(done.stdout), _DEADLINE_S)
    assert (end.state, end.exit_code) == ("FAILED", "78:0")
    (output,) = tmp_path.glob("*.out")
    assert "did you mean 'lr'?" in output.read_text()


def test_submit_refuses_what_the_partition_would_never_start(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "hpc_grpo.cli", "submit", *arguments(tmp_path), "--nodes", "3"]
    done = slurm_cluster.run(argv, environment=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 78
    assert "launch.num_nodes (--nodes) = 3, but a job of partition workq has at most 2" in done.stderr


def test_a_wrong_interface_is_named_with_the_node_and_those_it_has(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    argv = ["sbatch", "--parsable", "--nodes=2", "--time=2", SBATCH, *arguments(tmp_path), "launch.interface=hsn9"]
    done = slurm_cluster.run(argv, environment=ENVIRONMENT, cwd=tmp_path)
    job_id = int(done.stdout)
    assert wait(slurm_cluster, job_id, tmp_path).exit_code == "69:0"
    record = attempt(tmp_path)
    assert record["exit_kind"] == "bringup_failed"
    assert "launch.interface = hsn9: nid001 has no such interface" in record["why"]
    assert "It has: eth0 (198.18.0.11)" in record["why"]
