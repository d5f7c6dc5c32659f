"""Caches and weight files of Hugging Face on this disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.system.hugging_face import datasets_cache, find_model, hub_cache, read_header, weight_files


def write_snapshot(repository: Path, revision: str) -> Path:
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_a_model_by_name_is_the_main_snapshot_in_the_cache_of_the_environment(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    write_snapshot(repository, "old")
    new = write_snapshot(repository, "new")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("new")
    assert find_model("org/name", {"HF_HOME": str(tmp_path)}) == new
    assert find_model("org/name", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == new


def test_caches_are_where_hugging_face_keeps_them() -> None:
    assert hub_cache({}) == Path("~/.cache/huggingface/hub").expanduser()
    assert hub_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/hub")
    assert datasets_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/huggingface/datasets")
    assert datasets_cache({"HF_HOME": "/x", "HF_DATASETS_CACHE": "/y"}) == Path("/y")


def test_weights_in_parts_are_the_files_of_the_index(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    (tmp_path / "pytorch_model.bin").touch()
    assert weight_files(tmp_path) == [tmp_path / "pytorch_model.bin"]
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b", "y": "a", "z": "a"}}))
    assert weight_files(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    index.write_text("{}")
    with pytest.raises(ConfigError, match="is no index of weights"):
        weight_files(tmp_path)


def test_the_header_gives_shapes_and_the_length_of_the_whole_file(tmp_path: Path) -> None:
    entries = {"__metadata__": {"format": "pt"}, "w": {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}}
    header = json.dumps(entries).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(6))
    assert read_header(file).shapes == {"w": (2, 3)}
    assert read_header(file).file_bytes == file.stat().st_size
