from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import RunDir, drop_torn_line, read_jsonl, step_dirs, write_atomic, write_json_atomic


def test_write_atomic_makes_folders_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "state.json"
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two"
    assert [entry.name for entry in path.parent.iterdir()] == ["state.json"]


def test_write_atomic_that_fails_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.json"
    write_atomic(path, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_write_atomic_sets_the_mode_before_the_content_is_there(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_atomic(path, "secret", mode=0o600)
    assert path.stat().st_mode & 0o777 == 0o600


def test_write_json_atomic_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json_atomic(path, {"a": [1, None, "ü"]})
    assert json.loads(path.read_text()) == {"a": [1, None, "ü"]}


def test_read_jsonl_skips_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 2}]
    assert list(read_jsonl(tmp_path / "absent")) == []


@pytest.mark.parametrize("content", ["", "a\n", "a\nb\n"])
def test_whole_lines_stay(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    drop_torn_line(path)
    assert path.read_text() == content


@pytest.mark.parametrize(("content", "left"), [("a\nb", "a\n"), ("b", "")])
def test_torn_line_is_cut_off(tmp_path: Path, content: str, left: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(content)
    drop_torn_line(path)
    assert path.read_text() == left
    drop_torn_line(tmp_path / "absent")


def test_step_dirs_are_those_named_by_a_step(tmp_path: Path) -> None:
    for name in ("step_2", "step_10", ".step_3.tmp", "step_x", "step_4.old"):
        (tmp_path / name).mkdir()
    assert step_dirs(tmp_path) == {2: tmp_path / "step_2", 10: tmp_path / "step_10"}


def test_latest_export_is_by_number(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.latest_export() is None
    for step in (9, 10):
        run_dir.export(step).mkdir(parents=True)
    assert run_dir.latest_export() == run_dir.export(10)


def test_attempts_are_counted_up(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.next_attempt_number() == 1
    run_dir.attempt(9, "job").mkdir(parents=True)
    run_dir.attempt(10, "local12").mkdir()
    assert run_dir.next_attempt_number() == 11


def test_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    blocker: Any = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .* Set run\.root"):
        RunDir(blocker / "run").create()
