"""What users see of a fleet: the picture that updates itself, and a job's log as it grows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import sqlalchemy as sa
from click.testing import CliRunner
from rich.console import Console

from hpc_grpo.cli.fleet import fleet
from hpc_grpo.fleet.controller import JobLogs
from hpc_grpo.fleet.db import Database, jobs
from hpc_grpo.fleet.messages import AttemptKey, AttemptSeen
from hpc_grpo.fleet.tables import picture
from tests.support.simulated_vms import add_jobs


def set_row(db: Database, job_id: str, **values: object) -> None:
    with db.write() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.job_id == job_id).values(**values))


def test_the_picture_shows_the_jobs_that_run_before_those_that_wait(db: Database) -> None:
    add_jobs(db, 100, submitted_at=1000.0)
    set_row(db, "job-1", status="running", submitted_at=1.0)
    set_row(db, "job-2", status="failed", submitted_at=1.0)
    console = Console(record=True, width=200, height=30)
    console.print(picture(db, console.height))
    shown = [line.split()[0] for line in console.export_text().splitlines() if " job-" in line]
    assert shown[0] == "job-1"
    assert shown[-1] == "job-2"
    assert 5 < len(shown) < 30


def test_a_followed_log_goes_on_with_the_next_attempts_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "fleet"
    assert CliRunner().invoke(fleet, ["--fleet", str(folder), "init"]).exit_code == 0
    db = Database(f"sqlite:///{folder / 'fleet.db'}")
    add_jobs(db, 1, status="failed", retry_at=5.0)
    logs = JobLogs(folder / "logs")

    def keep(attempt: int, text: bytes) -> None:
        logs.add(AttemptSeen(AttemptKey("job-1", attempt), (0,), None, len(text), text), 0)

    def a_second_later(_seconds: float) -> None:
        keep(2, b"second\n")
        set_row(db, "job-1", status="completed", retry_at=None)

    keep(1, b"the first one was longer\n")
    # Not `time.sleep` itself: threads of other tests may sleep too.
    monkeypatch.setattr("hpc_grpo.cli.fleet.time", SimpleNamespace(sleep=a_second_later))
    done = CliRunner().invoke(fleet, ["--fleet", str(folder), "logs", "job-1", "--follow"])
    assert done.output == "the first one was longer\nsecond\n"
    db.close()
