from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from hpc_grpo.cli import main
from hpc_grpo.cli.status import COMMANDS
from tests.unit.report.run_builder import RunBuilder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty runs root, which commands find by itself."""
    monkeypatch.setenv("HPC_GRPO_RUNS_ROOT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def built(root: Path) -> RunBuilder:
    return RunBuilder(root / "adder")


@pytest.fixture
def call() -> Callable[..., Result]:
    """Runs one of the commands as `hpc-grpo` would: an error becomes a message and an exit code."""
    group: click.Group = type(main)("hpc-grpo", commands={command.name or "": command for command in COMMANDS})
    return lambda *words: CliRunner().invoke(group, words, catch_exceptions=False)
