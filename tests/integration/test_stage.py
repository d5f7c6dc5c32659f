"""What nodes copy to their own disks: a run from such copies, with what engines compiled before."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.launch.agent.stage import staged
from hpc_grpo.launch.supervisor.attempt_setup import stage_of
from hpc_grpo.run.files import read_jsonl
from tests.integration.telling_reward import EARLIER, OWN
from tests.integration.training_runs import Attempt

pytestmark = pytest.mark.integration


def test_a_run_trains_from_copies_and_keeps_what_it_compiles(
    workspace: Path, stopped_ahead: tuple[Attempt, Attempt]
) -> None:
    stage = stage_of(load_config(str(workspace / f"{stopped_ahead[0].run_dir.path.name}.yaml")), workspace, os.environ)
    here, copies = next(iter(read_jsonl(workspace / "told.jsonl"))), staged(stage, Path("/tmp"))
    assert here["python"] == copies.python
    assert here["kernels"] == [EARLIER]
    assert here["weights"]["model.safetensors"] == (workspace / "tied" / "model.safetensors").stat().st_size
    with tarfile.open(stage.compiled) as archive:
        assert {f"triton/{EARLIER}", f"triton/{OWN}"} <= set(archive.getnames())
    assert [path for path in (copies.environment, copies.weights, copies.compiled) if path and path.exists()] == []
