"""A fingerprint changes with what the run reads, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpc_grpo.config import Config
from hpc_grpo.config.train import PpoArgs, PpoTask
from hpc_grpo.data import sources
from hpc_grpo.data.fingerprint import fingerprints, local_fingerprints
from hpc_grpo.errors import ConfigError
from tests.support.configs import minimal_config


@pytest.fixture
def config(tmp_path: Path) -> Config:
    (tmp_path / "m").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "README.md"):
        (tmp_path / "m" / name).write_text("{}")
    (tmp_path / "d.jsonl").write_text('{"question": "1"}\n')
    (tmp_path / "mine.py").write_text("import words\n")
    (tmp_path / "words.py").write_text("import json\n")
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    return minimal_config(
        model={"path": str(tmp_path / "m")},
        data={"train": {"path": "d.jsonl"}, "template": "chat.jinja"},
        rewards=[{"name": "mine.py:reward"}],
    )


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("d.jsonl", "data.train.path"),
        ("chat.jinja", "data.template"),
        ("mine.py", "rewards.0.name"),
        ("words.py", "rewards.0.name"),
        ("m/tokenizer.json", "model.path"),
        ("m/chat_template.jinja", "model.path"),
        ("m/model.safetensors", "model.path"),
        ("m/README.md", None),
    ],
)
def test_a_file_that_is_read_changes_the_fingerprint_of_its_key(
    name: str, key: str | None, config: Config, tmp_path: Path
) -> None:
    before = fingerprints(config, tmp_path, {})
    os.utime(tmp_path / "d.jsonl", (0, 0))
    assert fingerprints(config, tmp_path, {}) == before
    (tmp_path / name).write_text("other")
    now = fingerprints(config, tmp_path, {})
    assert [changed for changed in before if before[changed] != now[changed]] == ([key] if key else [])


def test_models_beside_the_policy_have_fingerprints_of_their_own(config: Config, tmp_path: Path) -> None:
    (tmp_path / "critic").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "critic" / name).write_text("{}")
    critic = config.model_copy(update={"task": PpoTask(args=PpoArgs(critic=str(tmp_path / "critic")))})
    before = fingerprints(critic, tmp_path, {})
    assert "task.args.critic" not in fingerprints(config, tmp_path, {})
    (tmp_path / "critic" / "model.safetensors").write_text("other")
    now = fingerprints(critic, tmp_path, {})
    assert [key for key in now if now[key] != before[key]] == ["task.args.critic"]
    (tmp_path / "critic" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"task\.args\.critic = .*: the folder has no config\.json"):
        fingerprints(critic, tmp_path, {})


def test_another_model_that_is_the_reference_has_a_fingerprint(config: Config, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "other" / name).write_text("{}")
    loss = minimal_config(loss={"kl": {"coef": 0.1, "reference": str(tmp_path / "other")}}).loss
    assert "loss.kl.reference" in fingerprints(config.model_copy(update={"loss": loss}), tmp_path, {})


def test_what_tools_keep_beside_a_saved_data_set_is_no_part_of_it(config: Config, tmp_path: Path) -> None:
    """`load_from_disk(folder).map(f)`, in a notebook say, leaves its result in the folder; a download its times."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_text("rows")
    config = config.model_copy(update={"data": minimal_config(data={"train": {"path": "saved"}}).data})
    before = local_fingerprints(config, tmp_path)
    (tmp_path / "saved" / ".cache" / "huggingface").mkdir(parents=True)
    for name in ("cache-be3d33521cefe4ed.arrow", "tmpx1y2z3", ".cache/huggingface/data.metadata"):
        (tmp_path / "saved" / name).write_text("other rows")
    assert local_fingerprints(config, tmp_path) == before
    (tmp_path / "saved" / "data-00000-of-00001.arrow").write_text("others")
    assert local_fingerprints(config, tmp_path) != before


def test_items_that_a_function_makes_are_told_beside_its_file(config: Config, tmp_path: Path) -> None:
    """A login node compares the file alone: it does not make the items."""
    (tmp_path / "rows.py").write_text("def rows():\n    yield {}\n")
    data = minimal_config(data={"train": {"path": f"{tmp_path}/rows.py:rows"}}).data
    config = config.model_copy(update={"data": data})
    found = fingerprints(config, tmp_path, {"data.train": "abc"})
    assert found["data.train.items"] == {"sha256": "abc"}
    assert found["data.train.path"] == local_fingerprints(config, tmp_path)["data.train.path"]
    assert list(found["data.train.path"]) == ["rows.py"]


def test_of_a_large_file_blocks_are_hashed_up_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_WHOLE_BYTES", 10)
    monkeypatch.setattr(sources, "_BLOCK_BYTES", 4)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(1000))
    before = sources.of_file(path, whole=False)
    assert "64 blocks" in before
    path.write_bytes(bytes(999) + b"1")
    assert sources.of_file(path, whole=False) != before
