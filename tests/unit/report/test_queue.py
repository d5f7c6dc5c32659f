"""`status --slurm` asks once and not too often; without it nothing asks. Counted by programs first on PATH."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.support.command import call
from tests.support.run_builder import RunBuilder
from tests.support.slurm_programs import SlurmPrograms

START = "2026-01-02T03:04:05"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmPrograms:
    programs = SlurmPrograms(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{programs.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return programs


def a_minute_later(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "hpc-grpo" / "slurm_queue.json"
    answer = json.loads(path.read_text())
    path.write_text(json.dumps({**answer, "asked_at": time.time() - 61.0}))


def test_only_status_with_slurm_asks_the_scheduler(root: Path, built: RunBuilder, slurm: SlurmPrograms) -> None:
    built.log(built.attempt(1, "resumable"), "a line\n")
    built.chain("11", "12", successor="12")
    RunBuilder(root / "fresh").chain("20")
    over = RunBuilder(root / "over")
    over.attempt(1, "complete")
    over.run.complete_marker.touch()
    commands = ["status", "status --json", "logs adder", "logs fresh", "status --why adder", "watch over"]
    for words in commands:
        assert call(*words.split()).exit_code == 0
    assert slurm.calls == []
    assert call("status", "--slurm").exit_code == 0
    assert slurm.calls == ["squeue --noheader --array --format=%i|%T|%S|%r --jobs=12,20 --states=all"]


def test_states_reasons_and_expected_starts_are_columns_and_json(
    root: Path, built: RunBuilder, slurm: SlurmPrograms
) -> None:
    built.attempt(1)
    built.hold(1)
    built.chain("11", "12", successor="12")
    RunBuilder(root / "fresh").chain("20")
    listed = f"11|RUNNING|{START}|None\n12|PENDING|N/A|Dependency\n20|PENDING|{START}|Priority\n"
    slurm.answer("squeue", f"A line of the site's own squeue.\n\n{listed}")
    title, adder, fresh, asked = call("status", "--slurm").output.splitlines()
    assert "walltime left  heartbeat  Slurm" in title
    assert title.index("Slurm") == adder.index("11 RUNNING, 12 PENDING (Dependency)")
    assert title.index("estimated start") == fresh.index("2026-01-02 03:04")
    assert "20 PENDING (Priority)" in fresh
    assert asked == "Slurm was asked 0 s ago."
    one, two = json.loads(call("status", "--slurm", "--json").output)
    assert [job["state"] for job in one["slurm"]["jobs"]] == ["RUNNING", "PENDING"]
    starts_at = time.mktime(time.strptime(START, "%Y-%m-%dT%H:%M:%S"))
    assert two["slurm"]["jobs"] == [{"job_id": "20", "state": "PENDING", "reason": "Priority", "starts_at": starts_at}]
    assert len(slurm.calls) == 1


def test_all_jobs_of_a_run_that_waits_are_shown_the_next_one_first(built: RunBuilder, slurm: SlurmPrograms) -> None:
    built.chain("23", "24", "25")
    slurm.answer("squeue", f"23|PENDING|{START}|Resources\n24|PENDING|N/A|Dependency\n25|PENDING|N/A|Dependency\n")
    _, line, _ = call("status", "--slurm").output.splitlines()
    assert "23 PENDING (Resources), 24 PENDING (Dependency), 25 PENDING (Dependency)" in line
    assert json.loads(call("status", "--json").output)[0]["job_id"] == "23"


def test_within_a_minute_the_last_answer_counts(built: RunBuilder, slurm: SlurmPrograms, tmp_path: Path) -> None:
    built.chain("11")
    slurm.answer("squeue", "11|PENDING|N/A|Priority\n")
    call("status", "--slurm")
    slurm.answer("squeue", f"11|RUNNING|{START}|None\n")
    again = call("status", "--slurm").output
    assert "11 PENDING (Priority)" in again
    assert len(slurm.calls) == 1
    a_minute_later(tmp_path)
    assert "11 RUNNING" in call("status", "--slurm").output
    assert len(slurm.calls) == 2


def test_the_age_of_an_answer_is_shown(
    built: RunBuilder, slurm: SlurmPrograms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.chain("11")
    call("status", "--slurm")
    later = time.time() + 31.0
    monkeypatch.setattr(time, "time", lambda: later)
    assert call("status", "--slurm").output.endswith("Slurm was asked 31 s ago.\n")
    assert len(slurm.calls) == 1


@pytest.mark.parametrize("queue", ["11|CANCELLED|N/A|None\n", ""])
def test_a_waiting_job_that_was_cancelled_by_hand_is_seen(built: RunBuilder, slurm: SlurmPrograms, queue: str) -> None:
    built.chain("11")
    assert "will not start" not in call("status").output
    slurm.answer("squeue", queue)
    shown = call("status", "--slurm").output
    assert f"Slurm says: 11 ({'CANCELLED' if queue else 'GONE'}). Submit it again: hpc-grpo submit adder" in shown


def test_a_job_that_slurm_has_forgotten_is_gone(built: RunBuilder, slurm: SlurmPrograms) -> None:
    built.chain("11")
    slurm.answer("squeue", "", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    assert "11 GONE" in call("status", "--slurm").output


def test_a_scheduler_that_does_not_answer_is_not_asked_again_within_a_minute(
    built: RunBuilder, slurm: SlurmPrograms
) -> None:
    built.chain("11")
    slurm.answer("squeue", "", code=1)
    for _ in range(2):
        result = call("status", "--slurm")
        assert result.exit_code == 0
        assert "squeue" in result.stderr and "asked again after 60 s" in result.stderr
        assert "submitted" in result.stdout, "what the run directory says is shown all the same"
    assert len(slurm.calls) == 1


def test_runs_without_jobs_cost_no_call(built: RunBuilder, slurm: SlurmPrograms) -> None:
    built.attempt(1, "resumable")
    assert call("status", "--slurm").output.endswith("No job to ask about.\n")
    assert slurm.calls == []


def test_squeue_runs_without_the_users_settings_of_it(
    built: RunBuilder, slurm: SlurmPrograms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    built.chain("11")
    call("status", "--slurm")
    environ = slurm.environ("squeue")
    assert "SQUEUE_PARTITION" not in environ
    assert environ["SLURM_TIME_FORMAT"] == "standard"
