"""What nodes copy to their own disks: a run from such copies, with what engines compiled before."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.launch.agent.stage import staged
from hpc_grpo.launch.supervisor.attempt_setup import stage_of
from hpc_grpo.run.compiled import save
from hpc_grpo.run.files import read_jsonl
from tests.integration.telling_reward import KERNEL
from tests.integration.training_runs import HERE, run_to_end, small_environment, tiny_config

pytestmark = [pytest.mark.integration, pytest.mark.long]


def test_a_run_trains_from_copies_and_keeps_what_it_compiles(workspace: Path, tmp_path: Path) -> None:
    environment = small_environment(tmp_path / "environment", tmp_path / "traces")
    told = tmp_path / "told.jsonl"
    config = tiny_config(
        workspace,
        "staged",
        rewards=[{"name": f"{HERE / 'telling_reward.py'}:tell", "args": {"told": str(told)}}],
        train={"total_steps": 1},
        eval={"reward": "correctness"},
        launch={"stage": {"environment": str(environment), "model": True}},
    )
    stage = stage_of(load_config(str(config)), workspace, os.environ)
    earlier = tmp_path / "earlier" / "triton" / "earlier.so"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("compiled")
    assert save(tmp_path / "earlier", Path(stage.compiled))
    run_to_end(config)
    here, copies = next(iter(read_jsonl(told))), staged(stage, Path("/tmp"))
    assert here["python"] == str(copies["environment"] / "bin" / "python")
    assert here["kernels"] == [earlier.name]
    assert here["weights"]["model.safetensors"] == (workspace / "tied" / "model.safetensors").stat().st_size
    with tarfile.open(stage.compiled) as archive:
        assert {f"triton/{earlier.name}", f"triton/{KERNEL}"} <= set(archive.getnames())
    assert [path for path in copies.values() if path.exists()] == []
