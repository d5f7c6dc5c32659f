from __future__ import annotations

from pathlib import Path

from hpc_grpo.learner.publish_dir import publish, start_staging


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
