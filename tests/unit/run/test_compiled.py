from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from hpc_grpo.run.compiled import archive_of, save, unpack
from tests.support.configs import minimal_config


def node_folder(folder: Path, archive: Path, home: Path) -> Path:
    folder.mkdir()
    unpack(archive, folder, {"HOME": str(home)})
    return folder


def test_a_later_node_begins_with_what_an_earlier_one_has_compiled(tmp_path: Path) -> None:
    archive = tmp_path / ".compiled" / "x.tar"
    first = node_folder(tmp_path / "a", archive, tmp_path)
    (first / "vllm" / "torch_compile_cache").mkdir()
    (first / "vllm" / "torch_compile_cache" / "graph.py").write_text("graph")
    (first / "triton" / "kernel.so").write_text("kernel")
    (first / "vllm" / "gpu_p2p_access_cache_for_0,1.json").write_text("of this node's GPUs")
    assert save(first, archive)
    assert (archive.parent.stat().st_mode & 0o777, archive.stat().st_mode & 0o022) == (0o700, 0)
    second = node_folder(tmp_path / "b", archive, tmp_path)
    assert (second / "vllm" / "torch_compile_cache" / "graph.py").read_text() == "graph"
    assert (second / "triton" / "kernel.so").read_text() == "kernel"
    assert not save(second, archive), "nothing is new"
    (second / "inductor" / "more").write_text("more")
    assert save(second, archive)
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["inductor/more", "triton/kernel.so", "vllm/torch_compile_cache/graph.py"]
    assert [path.name for path in archive.parent.iterdir()] == ["x.tar"]


def test_archives_that_nobody_begins_from_any_more_go(tmp_path: Path) -> None:
    unused, used = tmp_path / "unused.tar", tmp_path / "used.tar"
    for archive in (unused, used):
        tarfile.open(archive, "w").close()
        os.utime(archive, (0.0, 0.0))
    node_folder(tmp_path / "a", used, tmp_path)
    folder = node_folder(tmp_path / "b", tmp_path / "new.tar", tmp_path)
    (folder / "triton" / "kernel.so").write_text("kernel")
    assert save(folder, tmp_path / "new.tar")
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["new.tar", "used.tar"]


def test_vllms_notes_about_its_classes_stay_in_the_home_folder(tmp_path: Path) -> None:
    folder = node_folder(tmp_path / "a", tmp_path / "none.tar", tmp_path / "home")
    (folder / "vllm" / "modelinfos" / "llama.json").write_text("{}")
    assert (tmp_path / "home" / ".cache" / "vllm" / "modelinfos" / "llama.json").read_text() == "{}"
    assert not save(folder, tmp_path / "none.tar")


@pytest.mark.parametrize("content", [b"", b"no archive", b"\0" * 10_240])
def test_a_damaged_archive_costs_compiling_and_is_written_anew(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "x.tar"
    archive.write_bytes(content)
    folder = node_folder(tmp_path / "a", archive, tmp_path)
    assert ("Engines compile again" in capsys.readouterr().err) == (content != b"\0" * 10_240), "an empty one is whole"
    (folder / "triton" / "kernel.so").write_text("kernel")
    assert save(folder, archive)
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["triton/kernel.so"]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_nobody_runs_what_another_user_has_compiled(tmp_path: Path) -> None:
    archive = tmp_path / "x.tar"
    first = node_folder(tmp_path / "a", archive, tmp_path)
    (first / "triton" / "kernel.so").write_text("kernel")
    assert save(first, archive)
    os.chown(archive, 12345, 12345)
    assert list((node_folder(tmp_path / "b", archive, tmp_path) / "triton").iterdir()) == []


def test_runs_share_an_archive_if_their_engines_compile_the_same() -> None:
    config = minimal_config()
    assert archive_of(config) == archive_of(minimal_config(run={"name": "another"}, train={"lr": 1e-5}))
    assert archive_of(config) != archive_of(minimal_config(engine={"vllm": {"max_num_seqs": 3}}))
