from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.run import space as disk
from hpc_grpo.run.ledger import Ledger, check_ledger
from hpc_grpo.run.paths import RunDir


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_RETRY_S", 0.0)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_is_repeated_until_it_fits(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    failures = [OSError(number, os.strerror(number))] * 3

    def write() -> str:
        if failures:
            raise failures.pop()
        return "written"

    assert disk.when_there_is_space(write, "metrics.jsonl") == "written"
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"{os.strerror(number)}: metrics.jsonl cannot be written. The run waits for space; free some, and it goes on."
    ]


def test_other_errors_are_not_waited_out() -> None:
    def write() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(PermissionError):
        disk.when_there_is_space(write, "metrics.jsonl")


def test_waiting_ends_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = [500, 1000, 1100]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: usage._replace(free=free.pop(0)))
    disk.wait_for_space(tmp_path, 1000, "A checkpoint")
    assert free == []
    assert capsys.readouterr().out.startswith("A checkpoint needs 0.00 GiB in ")


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
    ledger.append(2, [2, 3])
    verdict = check_ledger(RunDir(tmp_path))
    assert (verdict.steps, verdict.ordinals, verdict.undone) == (2, 4, 0)
    assert len(RunDir(tmp_path).ledger.read_text().splitlines()) == 2
