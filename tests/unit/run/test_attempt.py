"""What an attempt died of, and its record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpc_grpo.run.attempt import AttemptRecord, classify


@pytest.mark.parametrize(
    ("returncode", "complete", "signalled", "lost", "kind", "code"),
    [
        (0, True, "", {}, "complete", 0),
        (-9, True, "", {"n2": "Ray ended"}, "complete", 0),
        (0, False, "", {}, "crash", 1),
        (75, False, "", {}, "resumable", 75),
        (75, False, "SIGTERM", {}, "resumable", 75),
        (78, False, "", {}, "config", 78),
        (1, False, "SIGINT", {}, "cancelled", 1),
        (1, False, "", {"n2": "Ray ended"}, "node_lost", 1),
        (69, False, "", {}, "node_lost", 1),
        (78, False, "", {"n2": "Ray ended"}, "node_lost", 1),
        (3, False, "", {}, "crash", 3),
        (-9, False, "", {}, "crash", 137),
    ],
)
def test_a_drivers_end_decides_what_the_attempt_died_of(
    returncode: int, complete: bool, signalled: str, lost: dict[str, str], kind: str, code: int
) -> None:
    assert classify(returncode, complete, signalled, lost)[:2] == (kind, code)


def test_exit_code_0_without_complete_is_a_crash() -> None:
    assert "wrote no COMPLETE" in classify(0, False, "", {})[2]


def test_a_driver_killed_by_sigkill_names_the_likely_cause() -> None:
    assert "SIGKILL (often the kernel, out of memory)" in classify(-9, False, "", {})[2]


@pytest.mark.parametrize(
    ("returncode", "why"),
    [
        (3, "The driver crashed with exit code 3: KeyError: 'x'; see driver.log."),
        (78, "Something must be changed first: KeyError: 'x'; see driver.log."),
        (-6, "The driver was killed by SIGABRT: KeyError: 'x'; see driver.log."),
        (-9, "The driver was killed by SIGKILL (often the kernel, out of memory); see driver.log."),
        (75, "Checkpointed with more to do; start it again to carry on."),
    ],
)
def test_the_drivers_last_error_is_told_where_it_is_the_cause(returncode: int, why: str) -> None:
    assert classify(returncode, False, "", {}, "KeyError: 'x'")[2] == why


def test_a_record_can_be_read_while_the_attempt_runs_and_after(tmp_path: Path) -> None:
    record = AttemptRecord(1, "17", "slurm", ["n1"], 1.0, None, 5)
    record.save(tmp_path)
    assert json.loads((tmp_path / "attempt.json").read_text())["exit_kind"] == "running"
    record.end("crash", 1, "why")
    record.save(tmp_path)
    written = json.loads((tmp_path / "attempt.json").read_text())
    assert (written["exit_kind"], written["exit_code"], written["why"]) == ("crash", 1, "why")
    assert written["ended_at"] > 1.0
