"""An attempt of a link, before its nodes are started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.errors import LaunchError
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.place import job_command
from hpc_grpo.launch.supervisor import attempt
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from tests.support.places import FakePlace, allocation


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(attempt.time, "sleep", slept.append)
    return slept


def test_a_place_that_does_not_answer_is_asked_again(slept: list[float]) -> None:
    assert attempt._patiently_allocated(FakePlace(silent=3)) == FakePlace().nodes
    assert slept == [2.0, 10.0, 30.0]


def test_the_last_sign_of_life_of_a_killed_attempt_is_kept_as_its_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    killed, ended = (AttemptRecord(number, str(number), "slurm", [], 1.0, None, 1) for number in (1, 2))
    ended.end("crash", 1, "It crashed.")
    for record in (killed, ended):
        folder = run.attempt(record.attempt, record.job_id)
        folder.mkdir(parents=True)
        record.save(folder)
    for number in (1, 2):
        attempt._close_record(run, LockOwner("nid001", 1, 1, str(number), number, beat_at=77.0))
    assert [record.ended_at for record in read_attempts(run)] == [77.0, ended.ended_at]


def test_one_that_never_answers_is_an_error(slept: list[float]) -> None:
    with pytest.raises(LaunchError, match="does not answer"):
        attempt._patiently_allocated(FakePlace(silent=99))
    assert sum(slept) == 102.0


def test_a_light_installation_on_the_login_node_starts_that_of_the_jobs_on_the_head_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"run.root={tmp_path}", "launch.python=/proj/env/bin/python"]
    run = freeze(load_config("local/debug", words), [], []).run
    became: list[list[str]] = []

    def execvpe(_file: str, argv: list[str], _environ: dict[str, str]) -> None:
        became.append(argv)
        raise SystemExit(0)

    place = FakePlace(replace(allocation("nid001"), this_node=None), wrap=lambda node, command: [node, *command])
    monkeypatch.setattr(attempt, "find_place", lambda: place)
    monkeypatch.setattr(attempt.os, "execvpe", execvpe)
    monkeypatch.setattr(job_command, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit):
        attempt.run_attempt(run, "hpc_grpo.driver.main", attempt.JobRole())
    [command] = became
    assert command[0] == "nid001"
    inner = command[command.index("/proj/env/bin/python") :]
    assert inner[1:6] == ["-E", "-m", "hpc_grpo.cli", "attempt", str(run.path)]
