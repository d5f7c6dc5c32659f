from __future__ import annotations

from pathlib import Path

from hpc_grpo.run.publish_dir import publish, recover, start_staging


def test_content_appears_at_once_and_replaces_what_was_there(tmp_path: Path) -> None:
    final = tmp_path / "checkpoints" / "step_5"
    for text in ("first", "second"):
        staging = start_staging(final)
        (staging / "sub").mkdir()
        (staging / "sub" / "file").write_text(text)
        assert not final.exists() or (final / "sub" / "file").read_text() == "first"
        publish(final)
        assert (final / "sub" / "file").read_text() == text
    assert [path.name for path in final.parent.iterdir()] == ["step_5"]


def test_leavings_of_an_interrupted_attempt_are_removed(tmp_path: Path) -> None:
    final = tmp_path / "step_5"
    (start_staging(final) / "half").write_text("written")
    assert list(start_staging(final).iterdir()) == []


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
