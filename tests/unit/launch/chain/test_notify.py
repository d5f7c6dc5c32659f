"""The user's command hears what has become of the run, and its failures cost nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.launch.chain.decide import News
from hpc_grpo.launch.chain.notify import notify
from hpc_grpo.run.paths import RunDir


def test_the_command_runs_where_the_run_was_started_and_learns_what_happened(run: RunDir, tmp_path: Path) -> None:
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
def test_a_command_that_fails_is_reported_and_costs_nothing(
    command: list[str], expected: str, run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    notify(command, run, News("ended", "why"), deadline_s=0.2)
    assert expected in capsys.readouterr().out
