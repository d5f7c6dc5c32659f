"""Every path of a run directory is made in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import RunDir, step_dirs


def test_step_folders_are_those_named_by_a_step(tmp_path: Path) -> None:
    for name in ("step_2", "step_10", ".step_3.tmp", "step_x", "step_4.old"):
        (tmp_path / name).mkdir()
    assert step_dirs(tmp_path) == {2: tmp_path / "step_2", 10: tmp_path / "step_10"}


def test_the_latest_export_has_the_highest_number(tmp_path: Path) -> None:
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


def test_a_run_directory_that_cannot_be_made_is_an_error_with_a_fix(tmp_path: Path) -> None:
    blocker: Any = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written .* Set run\.root"):
        RunDir(blocker / "run").create()
