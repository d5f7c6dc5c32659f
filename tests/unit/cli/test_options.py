from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.cli.options import find_run, runs_below
from hpc_grpo.errors import ConfigError
from tests.support.run_builder import RunBuilder


@pytest.mark.parametrize("name", ["", "x" * 5000, "a\0b"])
def test_a_name_that_can_be_no_file_is_a_config_error(root: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a run directory"):
        find_run(name)


def test_a_folder_that_may_not_be_read_is_no_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunBuilder(root / "mine")

    def refuse(path: Path) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert runs_below(root) == []


def test_a_found_run_has_an_absolute_path(built: RunBuilder) -> None:
    assert find_run("runs/adder").path == built.run.path
