"""The runs that several tests look at, each made once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import EXIT_CRASH, EXIT_RESUMABLE
from hpc_grpo.run.paths import RunDir
from tests.integration.holding_driver import ENVIRONMENT
from tests.integration.training_runs import LETTERS, PAUSING, Attempt, complete_in_cluster, tiny_config, write_workspace

HERE = Path(__file__).parent
SFT_STEPS, SYNC_STEPS = 40, 12


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that share a cluster, so that `make test` can run the others beside them."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Give torch one thread here, as ranks have: test runs share the cores, and more get in each other's way."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def cluster(workspace: Path) -> Iterator[dict[str, str]]:
    """The environment of drivers that share one cluster, one after the other. Actors are forks of its templates."""
    shutil.copy(HERE / "holding_driver.py", workspace)  # named as a module: a driver named as a file has no templates
    with Attempt(tiny_config(workspace, "cluster"), "holding_driver") as holder:
        environment = holder.run_dir.path / ENVIRONMENT
        holder.wait_until(environment.exists, "cluster")
        yield json.loads(environment.read_text())


@pytest.fixture(scope="session")
def stopped_sft(workspace: Path, cluster: dict[str, str]) -> tuple[Attempt, Attempt]:
    """Imitating the demo's demonstrators: the attempt that the STOP file ended, and the one that completed the run."""
    config = tiny_config(
        workspace,
        "sft",
        task={"name": "sft", "args": {"batch_size": 16}},
        data={"train": {"path": str(workspace / "sft.jsonl")}},
        train={"total_steps": SFT_STEPS, "lr": 1e-2},
        checkpoint={"every": None},
    )
    with Attempt.in_cluster(cluster, config, PAUSING) as stopped:
        stopped.wait_for_step(5)
        stopped.run_dir.stop_marker.touch()
        assert stopped.wait() == EXIT_RESUMABLE, stopped.text
    stopped.run_dir.stop_marker.unlink()
    with Attempt.in_cluster(cluster, config) as completed:
        completed.wait_to_end()
    return stopped, completed


@pytest.fixture(scope="session")
def sft_run(stopped_sft: tuple[Attempt, Attempt]) -> RunDir:
    return stopped_sft[1].run_dir


@pytest.fixture(scope="session")
def corrupted_untied(workspace: Path, cluster: dict[str, str]) -> tuple[Attempt, Attempt]:
    """Untied embeddings, two optimizer steps a step, pass@2.

    In the first attempt a bit of the weights flips between learner and engines; the second is left alone.
    """
    config = tiny_config(
        workspace,
        "untied",
        "untied",
        train={"total_steps": 8, "num_minibatches": 2, "lr": 2e-3},
        eval={"every": 4, "num_samples": 3, "reward": LETTERS, "solved_at": 0.25},
        checkpoint={"keep_batches": 2},
    )
    with Attempt.in_cluster(cluster, config, str(HERE / "corrupting_driver.py")) as corrupted:
        assert corrupted.wait() == EXIT_CRASH, corrupted.text
    assert not corrupted.run_dir.is_complete()
    with Attempt.in_cluster(cluster, config) as completed:
        completed.wait_to_end()
    return corrupted, completed


@pytest.fixture(scope="session")
def untied_run(corrupted_untied: tuple[Attempt, Attempt]) -> RunDir:
    return corrupted_untied[1].run_dir


@pytest.fixture(scope="session")
def sync_settings(sft_run: RunDir) -> dict[str, Any]:
    """Two engines, from the SFT model so that completions are text; greedy eval."""
    return {
        "engine": {"engines_per_node": 2},
        "model": str(sft_run.latest_export()),
        "train": {"total_steps": SYNC_STEPS, "lr": 1e-3},
        "eval": {"every": 6, "temperature": 0.0},
    }


@pytest.fixture(scope="session")
def sync_run(workspace: Path, cluster: dict[str, str], sync_settings: dict[str, Any]) -> RunDir:
    """Synchronous, tied embeddings, never interrupted."""
    return complete_in_cluster(cluster, tiny_config(workspace, "sync", **sync_settings))
