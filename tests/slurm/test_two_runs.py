"""Two runs share two nodes; one is cancelled in the middle, and the other does not notice.

Both come from an environment that is as wrong as users' environments get.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.ledger import check_ledger
from tests.integration.training_runs import PAUSING, metrics_of, write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.small_runs import Node, SmallRun, run_of, two_node_config
from tests.stand_ins.pausing import GO

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = pytest.mark.slurm

REPOSITORY = Path(__file__).resolve().parents[2]
SBATCH = str(REPOSITORY / "sbatch" / "grpo_rlzero.sbatch")
NUM_STEPS = 12
LONG_NAME = ("a run name with spaces " * 9)[:199] + "."
STALE = {
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "1",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "RAY_ADDRESS": "192.0.2.1:6379",
    "http_proxy": "http://192.0.2.1:9",
    "https_proxy": "http://192.0.2.1:9",
    "HTTPS_PROXY": "http://192.0.2.1:9",
    "LD_PRELOAD": "/no/such/library.so",
    "CUDA_VISIBLE_DEVICES": "5,6",
    "ROCR_VISIBLE_DEVICES": "7",
    "HIP_VISIBLE_DEVICES": "8",
}
"""Of other launchers, clusters and sites."""
MUCH = {f"{prefix}_JUNK_{index}": "x" * 10240 for prefix in ("MODULE", "HF", "NCCL") for index in range(10)}
"""300 KiB; two thirds of it is let through to training."""


@dataclass(frozen=True)
class Outcome:
    """Of the run that went on and of the one that was cancelled in the middle."""

    survivor: SmallRun
    cancelled: SmallRun
    step_at_cancel: int
    before: dict[str, Node]
    after: dict[str, Node]
    shared_memory_of_others: dict[str, list[str]]


def submit_run(cluster: SlurmCluster, folder: Path, words: list[str], environment: Mapping[str, str]) -> int:
    """Run a command in a shell of this environment on the login node; the job id it prints."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**ENVIRONMENT, **environment}.items()]
    script = folder / "hand in.sh"
    script.write_text("\n".join([*exports, f"exec {shlex.join(words)}"]))
    return int(cluster.output(["bash", str(script)], cwd=folder).strip().rpartition("\n")[2])


def broken_modules(folder: Path, *names: str) -> str:
    """A folder for PYTHONPATH: whoever imports one of these modules dies."""
    folder.mkdir()
    for name in names:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} came from PYTHONPATH')")
    return str(folder)


@pytest.fixture(scope="module")
def outcome(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    workspace = write_workspace(tmp_path_factory.mktemp("two runs"))
    long_folder = workspace / ("t" * (119 - len(str(workspace))))
    long_folder.mkdir()
    environment = {**STALE, **MUCH, "TMPDIR": str(long_folder)}
    # What Slurm sets for a job does not reach it from outside, so it is set inside.
    setup = {"launch": {"setup_lines": ["export SLURM_CPU_BIND=quiet,mask_cpu:0x1 SLURM_CPU_BIND_TYPE=mask_cpu:"]}}
    surviving = two_node_config(workspace, "survivor", NUM_STEPS, run=named(workspace, LONG_NAME), **setup)
    two_node_config(workspace, "cancelled", 500)
    # `hpc-grpo submit` is a Python program of the user's own shell, so it needs Python's own modules to be whole.
    python_path = f"/no/such/folder:{broken_modules(workspace / 'heavy', 'ray', 'torch', 'vllm', 'numpy')}"
    submit = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(surviving), "--parsable", "--driver", PAUSING]
    others = {name: slurm_cluster.output(["ls", "/dev/shm"], on=name).split() for name in slurm_cluster.node_names}
    first = submit_run(slurm_cluster, workspace, submit, {**environment, "PYTHONPATH": python_path})
    # sbatch is none.
    python_path = broken_modules(workspace / "light", "json", "click", "torch")
    sbatch = ["sbatch", "--parsable", "--nodes=2", "--gpus-per-node=2", "--cpus-per-task=4", "--exclusive=user"]
    sbatch += ["--time=10", SBATCH, "cancelled.yaml"]
    second = submit_run(slurm_cluster, workspace, sbatch, {**environment, "PYTHONPATH": python_path})
    with (
        SmallRun(slurm_cluster, run_of(workspace, LONG_NAME), first) as survivor,
        SmallRun(slurm_cluster, run_of(workspace, "cancelled"), second) as cancelled,
    ):
        survivor.wait_for_step(2)
        cancelled.wait_for_step(2)
        before = cancelled.node_states()
        step = survivor.step
        slurm_cluster.output(["scancel", str(second)])
        assert cancelled.wait().state == "CANCELLED"
        slurm_cluster.wait_until(lambda: is_gone(cancelled), 30.0, "the cancelled run has no process left")
        after = cancelled.node_states()
        (survivor.run.path / GO).touch()
        survivor.wait()
        yield Outcome(survivor, cancelled, step, before, after, others)


def is_gone(run: SmallRun) -> bool:
    return not any(node.processes for node in run.node_states().values())


def named(workspace: Path, name: str) -> dict[str, str]:
    return {"name": name, "root": str(workspace / "runs")}


def test_a_run_from_a_hostile_environment_trains_to_the_end(outcome: Outcome) -> None:
    run = outcome.survivor.run
    print((run.slurm_logs / f"{outcome.survivor.job_id}_0_log.out").read_text())
    assert run.is_complete()
    assert check_ledger(run).is_sound
    assert list(metrics_of(run)) == list(range(1, NUM_STEPS + 1))
    (attempt,) = read_attempts(run)
    assert attempt.restarts == []


def test_it_was_training_beside_the_other_and_went_on_without_it(outcome: Outcome) -> None:
    assert 2 <= outcome.step_at_cancel < NUM_STEPS
    for node in outcome.before.values():
        assert node.processes
        assert node.folders


def test_the_one_that_was_cancelled_leaves_nothing(outcome: Outcome) -> None:
    ports = {(name, entry["port"]) for name, node in outcome.before.items() for entry in node.listening}
    assert len(ports) > 10
    of_survivor = (f"hg-{outcome.survivor.job_id}-", f"sem.hg-{outcome.survivor.job_id}-")
    for name, node in outcome.after.items():
        assert (node.processes, node.listening, node.folders) == ([], [], [])
        new = set(node.shared_memory) - set(outcome.shared_memory_of_others[name])
        assert [entry for entry in new if not entry.startswith(of_survivor)] == []
    cluster = outcome.survivor.cluster
    rows = {name: cluster.output(["ss", "-ltnH"], on=name).splitlines() for name in cluster.node_names}
    still_open = {(name, int(row.split()[3].rpartition(":")[2])) for name in rows for row in rows[name]}
    assert ports & still_open == set()
