from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.learner.checkpoint import CheckpointWriter, write_universal
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.run import source
from hpc_grpo.run.checkpoint import FileEntry, read_manifest

OF_RANK_1 = FileEntry("deepspeed/optimizer_rank_1.pt", 3, "0" * 32)


class FakeEngine:
    """Saves as DeepSpeed does: a file of tensors, and a script beside it."""

    def __init__(self, files: StagedFiles) -> None:
        self.files, self.weights = files, torch.ones(3)

    def save_checkpoint(self, folder: str, tag: str, *, save_latest: bool, exclude_frozen_parameters: bool) -> None:
        assert not exclude_frozen_parameters, "all of the weights are trained"
        self.files.makedirs(f"{folder}/{tag}", exist_ok=True)
        self.files.save({"module": self.weights}, f"{folder}/{tag}/optimizer_rank_0.pt")
        (Path(folder) / "script.py").touch()


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Rank 0 of two, whose other rank is elsewhere."""
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    files = StagedFiles()
    config = SimpleNamespace(train=SimpleNamespace(zero_stage=1))
    engine = FakeEngine(files)
    return SimpleNamespace(
        rank=0,
        world_size=2,
        ds_engine=engine,
        model=torch.nn.Linear(1, 1),
        parts=[],
        files=files,
        config=config,
        policy_version=4,
    )


@pytest.mark.parametrize("behind", [True, False])
def test_a_file_that_this_rank_does_not_see_yet_is_in_the_manifest(learner: Any, behind: bool, tmp_path: Path) -> None:
    writer = CheckpointWriter(learner, tmp_path / "step_2", {"step": 2}, behind=behind)
    learner.ds_engine.weights += 1.0
    own = writer.write()
    assert [entry.name for entry in own] == ["deepspeed/optimizer_rank_0.pt", "rng_rank_0.pt"]
    assert writer.publish([own, (OF_RANK_1,)]) < 60.0
    manifest = read_manifest(tmp_path / "step_2")
    assert manifest is not None
    names = ["deepspeed/optimizer_rank_0.pt", OF_RANK_1.name, "rng_rank_0.pt", "script.py"]
    assert [entry.name for entry in manifest.files] == names
    assert (manifest.policy_version, manifest.driver_state) == (4, {"step": 2})
    saved = learner.files.load(str(tmp_path / "step_2" / names[0]))
    assert saved["module"].tolist() == [1.0, 1.0, 1.0]


def test_a_file_that_cannot_be_written_is_an_error_that_names_the_checkpoint(learner: Any, tmp_path: Path) -> None:
    writer = CheckpointWriter(learner, tmp_path / "step_2", {"step": 2}, behind=True)
    (tmp_path / ".step_2.tmp" / "deepspeed").rmdir()
    with pytest.raises(HpcGrpoError, match=r"step_2 could not be written: .*deepspeed"):
        writer.write()
    assert not (tmp_path / "step_2").exists()


def test_a_checkpoint_is_converted_by_the_runs_own_copy_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ray worker imports that copy, and a program it starts would import what is installed by now."""
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(source, "runs_from_copy", lambda: True)
    write_universal(tmp_path / "step_2")
    assert commands[0][1:4] == [str(source.PACKAGE.parent), "-m", "hpc_grpo.learner.checkpoint"]


def test_a_universal_form_of_the_callers_own_folder_leaves_the_run_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(command: list[str], **kwargs: Any) -> SimpleNamespace:
        (Path(command[command.index("--output_folder") + 1]) / "zero").mkdir(parents=True)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", convert)
    (tmp_path / "run" / "step_2" / "deepspeed").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    before = sorted((tmp_path / "run").rglob("*"))
    write_universal(tmp_path / "run" / "step_2", tmp_path / "own")
    assert sorted((tmp_path / "run").rglob("*")) == before
    assert (tmp_path / "own" / "deepspeed" / "zero").is_dir()
