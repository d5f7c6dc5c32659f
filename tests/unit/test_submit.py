"""`hpc-grpo submit` as a user calls it: what it finds on the login node before anything is handed in."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_grpo.cli import main
from hpc_grpo.config import load_config
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.holder import Hold


def call(*words: str) -> Result:
    return CliRunner().invoke(main, words, catch_exceptions=False)


@pytest.mark.parametrize("command", ["train", "submit"])
def test_a_run_below_home_that_is_held_stays_as_it_is(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = freeze(load_config("local/debug", [f"run.root={tmp_path}/runs"]), [], []).run
    before = run.config.read_text()
    hold = Hold.take(run, "17", 1)
    result = call(command, "local/debug", "run.root=~/runs", "launch.slurm.time_min=7")
    hold.release()
    assert "is being trained by attempt 1" in result.stderr
    assert run.config.read_text() == before


def test_a_dry_run_shows_the_run_directory_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"attempt {tmp_path}/runs/debug\n" in call("submit", "local/debug", "run.root=~/runs", "--dry-run").output
