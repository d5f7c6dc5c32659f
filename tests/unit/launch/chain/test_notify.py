from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.launch.chain import notify as notification
from hpc_grpo.launch.chain.notify import News, notify
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.paths import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Started in the folder that it lies in."""
    run = RunDir(tmp_path / "run")
    run.create()
    write_json_atomic(run.source, {"working_dir": str(tmp_path)})
    return run


def test_the_command_runs_where_the_run_was_started_and_is_told_what_happened(run: RunDir, tmp_path: Path) -> None:
    line = 'echo "$1: $HPC_GRPO_EVENT $HPC_GRPO_RUN $HPC_GRPO_WHY" > told'
    notify(["sh", "-c", line, "sh", "me"], run, News("retrying", "Lost 1 node(s)."))
    assert (tmp_path / "told").read_text() == f"me: retrying {run.path} Lost 1 node(s).\n"


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["/nowhere/tell"], "No such file or directory: '/nowhere/tell'"),
        (["~nobody-of-that-name/tell"], "home directory"),
        (["sh", "-c", "exit 3"], "launch.notify ended with 3; it was to tell that the run is ended."),
        (["sleep", "60"], "timed out after 0."),
    ],
)
def test_a_command_that_fails_is_told_and_costs_nothing(
    command: list[str],
    expected: str,
    run: RunDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notification, "_DEADLINE_S", 0.2)
    notify(command, run, News("ended", "why"))
    assert expected in capsys.readouterr().out
