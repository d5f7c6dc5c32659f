"""What an attempt died of, and its record."""

from __future__ import annotations

import json
from pathlib import Path

from hpc_grpo.run.attempt import AttemptRecord


def test_a_record_can_be_read_while_the_attempt_runs_and_after(tmp_path: Path) -> None:
    record = AttemptRecord(1, "17", "slurm", ["n1"], 1.0, None, 5)
    record.save(tmp_path)
    assert json.loads((tmp_path / "attempt.json").read_text())["exit_kind"] == "running"
    record.end("crash", 1, "why")
    record.save(tmp_path)
    written = json.loads((tmp_path / "attempt.json").read_text())
    assert (written["exit_kind"], written["exit_code"], written["why"]) == ("crash", 1, "why")
    assert written["ended_at"] > 1.0
