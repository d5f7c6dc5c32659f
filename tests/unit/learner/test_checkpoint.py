from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_grpo.demo.model import make_tokenizer
from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.learner.checkpoint import CheckpointWriter, copy_settings, export_model, write_universal
from hpc_grpo.learner.model import load_policy
from hpc_grpo.learner.staging import StagedFiles
from hpc_grpo.run import source
from hpc_grpo.run.checkpoint import FileEntry, read_manifest
from tests.support.configs import minimal_config
from tests.support.tiny_models import write_family

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


def test_a_zero_3_checkpoint_before_the_first_step_has_the_state_that_adamw_makes(learner: Any, tmp_path: Path) -> None:
    """DeepSpeed converts no checkpoint without it for another number of learners."""
    flat, stepped = torch.ones(5, requires_grad=True), torch.ones(5, requires_grad=True)
    optimizer, other = (torch.optim.AdamW([own], fused=True) for own in (flat, stepped))
    learner.config.train.zero_stage = 3
    learner.ds_engine.optimizer = SimpleNamespace(fp32_partitioned_groups_flat=[flat], optimizer=optimizer)
    CheckpointWriter(learner, tmp_path / "step_0", {}, behind=True)
    stepped.grad = torch.zeros(5)
    other.step()
    filled, made = optimizer.state[flat], other.state[stepped]
    kinds = [{name: (own.dtype, own.device, own.shape, own.requires_grad) for name, own in state.items()}
             for state in (filled, made)]  # fmt: skip
    assert kinds[0] == kinds[1]
    assert not any(own.any() for own in filled.values())
    filled["exp_avg"] += 1.0
    CheckpointWriter(learner, tmp_path / "step_1", {}, behind=True)
    assert optimizer.state[flat]["exp_avg"].tolist() == [1.0] * 5, "the state of an optimizer that has stepped stays"


@pytest.fixture
def exporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A learner of two that exports; a collective of both would fail."""
    write_family(tmp_path / "model", "llama")
    config = minimal_config(model={"path": str(tmp_path / "model"), "dtype": "float32", "device": "cpu"},
                            data={"max_prompt_tokens": 16}, rollout={"max_new_tokens": 16})  # fmt: skip
    learner = SimpleNamespace(rank=0, config=config, model=load_policy(config, False), parts=[])
    monkeypatch.setattr("torch.distributed.get_rank", lambda: learner.rank)
    return learner


@pytest.mark.parametrize("own", [{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 7]}, None])
def test_an_export_has_the_generation_settings_of_the_model(exporting: Any, own: Any, tmp_path: Path) -> None:
    """transformers loads settings that it refuses to save."""
    file = tmp_path / "model" / "generation_config.json"
    file.unlink() if own is None else file.write_text(json.dumps(own))
    exporting.model = load_policy(exporting.config, False)
    (tmp_path / "model" / "tokenizer_before").mkdir()  # a folder with the name of a copied file
    export_model(exporting, tmp_path / "export")
    exported = tmp_path / "export" / "generation_config.json"
    assert (json.loads(exported.read_text()) if exported.exists() else None) == own
    assert (tmp_path / "export" / "model.safetensors").exists()


def test_a_learner_does_not_wait_until_another_one_has_written_the_export(exporting: Any, tmp_path: Path) -> None:
    """The write of a large model may take longer than a collective may wait."""
    exporting.rank = 1
    export_model(exporting, tmp_path / "export")
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"template": "own.jinja"}, "own"),
        ({"train": {"path": "d.jsonl", "template": "own.jinja"}, "eval": {"path": "e.jsonl"}}, "own"),
        ({"train": {"mix": [{"path": "d.jsonl"}, {"path": "e.jsonl", "template": "own.jinja"}]}}, "the model's"),
        ({"template": "plain"}, "the model's"),
    ],
    ids=["of the data", "of the only training data", "of a part of the training data", "plain"],
)
def test_the_chat_template_of_the_training_data_is_exported(
    data: dict[str, Any], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.jinja").write_text("own")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = tmp_path / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": "the model's"}))
    (tmp_path / "model" / "chat_template.json").write_text(json.dumps({"chat_template": "the model's"}))
    (tmp_path / "export").mkdir()
    copy_settings(minimal_config(model={"path": str(tmp_path / "model")}, data=data), tmp_path / "export")
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template == expected
    assert (tmp_path / "export" / "chat_template.json").exists() == (expected != "own"), "a processor prefers this file"
