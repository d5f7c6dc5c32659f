"""A run in containers on a real cluster: podman on each node, with the node's own root as the image."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hpc_grpo.run.attempt import read_attempts
from hpc_grpo.run.ledger import check_ledger
from tests.integration.training_runs import write_workspace
from tests.slurm.conftest import ENVIRONMENT
from tests.slurm.small_runs import SmallRun, run_of, two_node_config
from tools.virtual_slurm.layout import Layout

if TYPE_CHECKING:
    from tests.slurm.conftest import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

DEADLINE_S = 240.0
NUM_STEPS = 4
SECRET = "c0ffee-a-secret"
STAND_IN = str(Path(__file__).resolve().parents[1] / "stand_ins" / "driver.py")
_FILES = {"CONTAINERS_STORAGE_CONF": "storage.conf", "CONTAINERS_CONF": "containers.conf"}
_STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{0}/storage"\nrunroot = "{0}/run"\n'
_ENGINE = '[engine]\ncgroup_manager = "cgroupfs"\ntmp_dir = "{0}/tmp"\n'


@pytest.fixture
def podman(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """`launch` for containers of podman, which keeps to a folder of each node's own."""
    own = Layout.from_environment().local / "containers"
    (tmp_path / "storage.conf").write_text(_STORAGE.format(own))
    (tmp_path / "containers.conf").write_text(_ENGINE.format(own))
    yield {
        "container": {"image": "/:O", "engine": "podman", "python": sys.executable},
        "setup_lines": [f"export {name}={tmp_path / file}" for name, file in _FILES.items()],
    }
    for node in slurm_cluster.node_names:
        assert programs(slurm_cluster, tmp_path, node) == []
        slurm_cluster.run(["rm", "-rf", str(own)], on=node)


def programs(cluster: SlurmCluster, folder: Path, node: str) -> list[str]:
    """What podman knows of on a node, running or not."""
    environment = {name: str(folder / file) for name, file in _FILES.items()}
    label = '--format={{index .Labels "hpc-grpo.program"}}'
    return sorted(cluster.output(["podman", "ps", "--all", label], environment=environment, on=node).split())


def submit(cluster: SlurmCluster, config: Path, *words: str, **environment: str) -> SmallRun:
    command = [sys.executable, "-m", "hpc_grpo.cli", "submit", str(config), "--parsable", *words]
    exported = {**ENVIRONMENT, "WANDB_API_KEY": SECRET, **environment}
    return SmallRun(cluster, run_of(config.parent, config.stem), int(cluster.output(command, environment=exported)))


def assert_nothing_is_left(job: SmallRun) -> None:
    """On any node, of the job: processes, ports, folders and shared memory. The fixture looks for containers."""
    for node, state in job.node_states().items():
        of_run = [name for name in state.shared_memory if name != "libpod_lock"]  # podman's own, of no container
        assert (state.processes, state.listening, state.folders, of_run) == ([], [], [], []), node


def test_training_in_containers_on_two_nodes_is_complete(
    slurm_cluster: SlurmCluster, tmp_path: Path, podman: dict[str, Any]
) -> None:
    config = two_node_config(write_workspace(tmp_path), "boxed", NUM_STEPS, launch=podman)
    with submit(slurm_cluster, config) as job:
        job.wait_for_step(1)
        seen = job.node_states([SECRET])
        there = {node: programs(slurm_cluster, tmp_path, node) for node in slurm_cluster.node_names}
        assert job.wait().state == "COMPLETED"
    assert there == {"nid001": ["driver", "ray"], "nid002": ["ray"]}
    assert [state.needles for state in seen.values()] == [[], []]  # neither in a file nor in an argument
    assert job.run.is_complete()
    assert check_ledger(job.run).is_sound
    (record,) = read_attempts(job.run)
    assert (record.exit_kind, record.num_gpus) == ("complete", 4)
    assert_nothing_is_left(job)


def test_a_container_whose_client_was_killed_is_ended_and_ray_brought_up_anew(
    slurm_cluster: SlurmCluster, tmp_path: Path, podman: dict[str, Any]
) -> None:
    config = two_node_config(write_workspace(tmp_path), "orphan", NUM_STEPS, launch=podman)
    sleeping = {"HPC_GRPO_STAND_IN_SLEEP_S": "40"}
    with submit(slurm_cluster, config, "--driver", STAND_IN, **sleeping) as job:
        ready = job.run.path / "stand_in.json"
        slurm_cluster.wait_until(ready.is_file, DEADLINE_S, "the driver runs")
        # The clients alone: what is in their containers runs on without them.
        kill = "for pid in $(pgrep -f '[p]odman run'); do kill -9 $pid; done"
        slurm_cluster.output(["bash", "-c", kill], on="nid002")
        assert job.wait().state == "COMPLETED"
    (record,) = read_attempts(job.run)
    assert len(record.restarts) == 1
    assert "Ray ended by itself with exit code -9" in record.restarts[0]
    assert_nothing_is_left(job)
