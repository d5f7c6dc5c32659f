"""The ledger tells which ordinals the surviving weights were trained on, and keeps whole lines only."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.run.ledger import Ledger, LedgerLine, check_ledger, surviving_lineage
from hpc_grpo.run.paths import RunDir

Lines = list[tuple[int, int, tuple[int, ...]]]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def write(run_dir: RunDir, lines: Lines) -> None:
    for step, attempt, ordinals in lines:
        Ledger(run_dir, attempt).append(step, ordinals)


def test_an_uninterrupted_run_is_sound(run_dir: RunDir) -> None:
    write(run_dir, [(1, 1, (0, 1)), (2, 1, (2, 3)), (3, 1, (4, 5))])
    verdict = check_ledger(run_dir)
    assert verdict.is_sound
    assert str(verdict) == "3 steps, 6 ordinals, 0 steps undone by a resume: every ordinal trained exactly once"


def test_steps_trained_again_after_a_resume_count_once(run_dir: RunDir) -> None:
    write(run_dir, [(1, 1, (0, 1)), (2, 1, (2, 3)), (3, 1, (4, 5)), (2, 2, (2, 3)), (3, 2, (4, 5)), (4, 2, (6, 7))])
    verdict = check_ledger(run_dir)
    assert verdict.is_sound
    assert (verdict.steps, verdict.ordinals, verdict.undone) == (4, 8, 2)


def test_steps_of_a_dead_lineage_do_not_count_before_they_are_trained_again(run_dir: RunDir) -> None:
    """Attempt 2 fell back to the checkpoint of step 1 and has redone one of the two steps lost."""
    write(run_dir, [(1, 1, (0,)), (2, 1, (1,)), (3, 1, (2,)), (2, 2, (1,))])
    verdict = check_ledger(run_dir)
    assert (verdict.steps, verdict.ordinals, verdict.undone) == (2, 2, 2)
    assert verdict.is_sound


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([(1, 1, (0, 1)), (2, 1, (1, 2))], "ordinals used twice: [1]"),
        ([(1, 1, (0, 1)), (2, 1, (3,))], "ordinals skipped: [2]"),
        ([(1, 1, (0,)), (3, 1, (1,))], "steps without a line: [2]"),
        ([(1, 1, (0,)), (2, 1, (1,)), (2, 2, (2,))], "ordinals skipped: [1]"),
    ],
)
def test_a_ledger_that_is_not_sound_says_why(run_dir: RunDir, lines: Lines, words: str) -> None:
    write(run_dir, lines)
    verdict = check_ledger(run_dir)
    assert not verdict.is_sound
    assert words in str(verdict)


def test_ordinals_that_were_dropped_or_passed_over_are_used(run_dir: RunDir) -> None:
    ledger = Ledger(run_dir, 1)
    ledger.append(1, range(4), dropped=[1, 2])
    ledger.append(2, range(4, 7), passed_over=[5])
    verdict = check_ledger(run_dir)
    assert verdict.is_sound
    assert str(verdict).endswith("every ordinal used exactly once, 4 trained, 2 sampled and dropped, 1 passed over")
    ledger.append(3, [2, 7])
    assert "ordinals used twice: [2]" in str(check_ledger(run_dir))


def test_an_empty_ledger_is_sound(run_dir: RunDir) -> None:
    assert check_ledger(run_dir).is_sound
    assert surviving_lineage([]) == []


def test_a_torn_line_is_not_glued_to_the_next(run_dir: RunDir) -> None:
    write(run_dir, [(1, 1, (0,))])
    with run_dir.ledger.open("a") as file:
        file.write('{"step": 2, "att')
    write(run_dir, [(2, 2, (1,))])
    assert check_ledger(run_dir).is_sound


def test_the_lineage_keeps_the_newest_line_of_each_step() -> None:
    lines = [LedgerLine(step, attempt, ()) for step, attempt in [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (2, 3)]]
    assert [(line.step, line.attempt) for line in surviving_lineage(lines)] == [(1, 2), (2, 3)]


def test_a_line_that_did_not_fit_is_written_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first line got half-way to the disk."""
    ledger = Ledger(RunDir(tmp_path), attempt=1)
    ledger.append(1, [0, 1])
    real, calls = os.fsync, []

    def fsync(descriptor: int) -> Any:
        calls.append(descriptor)
        if len(calls) == 1:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 5)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    ledger.append(2, [2, 3])
    verdict = check_ledger(RunDir(tmp_path))
    assert (verdict.steps, verdict.ordinals, verdict.undone) == (2, 4, 0)
    assert len(RunDir(tmp_path).ledger.read_text().splitlines()) == 2
