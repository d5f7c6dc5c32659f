"""Model and data of a config, told apart by where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.preflight.prefetch import items_of
from tests.support.configs import minimal_config


def test_what_lies_in_the_folder_of_the_run_is_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"train": {"path": "org/rows"}, "eval": {"path": "x" * 300}}
    config = minimal_config(model={"path": "org/m"}, data=data)
    for name in ("org/m", "org/rows"):
        (tmp_path / "of the run" / name).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for here in ("of the run", "elsewhere"):
        monkeypatch.chdir(tmp_path / here)
        assert [item.is_local for item in items_of(config, tmp_path / "of the run")] == [True, True, False]
        assert [item.is_local for item in items_of(config, tmp_path / "elsewhere")] == [False, False, False]
