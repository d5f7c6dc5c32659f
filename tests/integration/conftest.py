"""The runs that several tests look at, each made once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_runs import LETTERS, Attempt, run_to_end, tiny_config, write_workspace

from hpc_grpo.run_dir import RunDir

SYNC_STEPS = 12


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workspace(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def sft_run(workspace: Path) -> RunDir:
    """Forty steps of imitating the demo's demonstrators."""
    config = tiny_config(
        workspace,
        "sft",
        task="sft",
        data={"train": {"path": str(workspace / "sft.jsonl")}},
        sft={"batch_size": 16},
        train={"total_steps": 40, "lr": 1e-2},
        checkpoint={"every_steps": None},
    )
    return run_to_end(config).run_dir


@pytest.fixture(scope="session")
def sync_settings(sft_run: RunDir) -> dict[str, Any]:
    """Two engines, from the SFT model so that completions are text; greedy eval."""
    return {
        "engine": {"engines_per_node": 2},
        "model": str(sft_run.latest_export()),
        "train": {"total_steps": SYNC_STEPS, "lr": 1e-3},
        "eval": {"every_steps": 6, "temperature": 0.0},
    }


@pytest.fixture(scope="session")
def sync_run(workspace: Path, sync_settings: dict[str, Any]) -> RunDir:
    """Synchronous, tied embeddings, never interrupted."""
    return run_to_end(tiny_config(workspace, "sync", **sync_settings)).run_dir


@pytest.fixture(scope="session")
def untied_run(workspace: Path) -> RunDir:
    """Synchronous, untied embeddings, two optimizer steps a step, pass@2."""
    config = tiny_config(
        workspace,
        "untied",
        "untied",
        train={"total_steps": 8, "num_minibatches": 2, "lr": 2e-3},
        eval={"every_steps": 4, "num_samples": 3, "pass_k": [1, 2], "reward": LETTERS, "solved_at": 0.25},
    )
    return run_to_end(config).run_dir


@pytest.fixture(scope="session")
def corrupted(workspace: Path) -> Attempt:
    """An attempt that ended because a bit of the weights flipped between learner and engines."""
    config = tiny_config(workspace, "corrupted")
    driver = str(Path(__file__).with_name("corrupting_driver.py"))
    with Attempt(config, driver) as attempt:
        attempt.wait()
    return attempt
