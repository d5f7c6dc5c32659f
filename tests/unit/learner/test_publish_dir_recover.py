"""A process can be killed between any two steps of publishing a folder; `recover` puts each case right."""

from __future__ import annotations

from pathlib import Path

from hpc_grpo.learner.publish_dir import recover


def folder(path: Path, content: str) -> None:
    path.mkdir()
    (path / "file").write_text(content)


def test_killed_while_staging(tmp_path: Path) -> None:
    folder(tmp_path / "step_1", "old")
    folder(tmp_path / ".step_1.tmp", "half")
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]


def test_killed_between_the_two_renames(tmp_path: Path) -> None:
    folder(tmp_path / ".step_1.old", "old")
    folder(tmp_path / ".step_1.tmp", "whole, but not known to be")
    recover(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    assert (tmp_path / "step_1" / "file").read_text() == "old"


def test_killed_before_the_old_one_was_removed(tmp_path: Path) -> None:
    folder(tmp_path / "step_1", "new")
    folder(tmp_path / ".step_1.old", "old")
    recover(tmp_path)
    assert (tmp_path / "step_1" / "file").read_text() == "new"
    assert not (tmp_path / ".step_1.old").exists()


def test_a_folder_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    recover(tmp_path / "checkpoints")
