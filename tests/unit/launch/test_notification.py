from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.launch import notification
from hpc_grpo.launch.notification import notify
from hpc_grpo.run_dir import RunDir


def test_the_command_finds_what_happened_in_its_environment(tmp_path: Path) -> None:
    told = tmp_path / "told"
    line = 'echo "$1: $HPC_GRPO_EVENT $HPC_GRPO_RUN $HPC_GRPO_WHY" > "$2"'
    notify(["sh", "-c", line, "sh", "me", str(told)], RunDir(tmp_path), "retrying", "Lost 1 node(s).")
    assert told.read_text() == f"me: retrying {tmp_path} Lost 1 node(s).\n"


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
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notification, "_DEADLINE_S", 0.2)
    notify(command, RunDir(tmp_path), "ended", "why")
    assert expected in capsys.readouterr().out


def test_without_a_command_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notify([], RunDir(tmp_path), "complete", "The run is complete.")
    assert capsys.readouterr().out == ""
