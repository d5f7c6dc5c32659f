"""Ending a run from outside: STOP first, then what waits, then what runs, and the record closed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from hpc_grpo.launch.chain import cancel
from hpc_grpo.launch.chain.cancel import cancel_run
from hpc_grpo.run.chain import ChainRecord, read_chain, write_chain
from hpc_grpo.run.files import write_json_atomic
from hpc_grpo.run.lock import LockOwner
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import start_time


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def cancelled(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    jobs: list[str] = []

    def cancel_jobs(job_ids: Sequence[str]) -> None:
        assert run.stop_marker.exists(), "a link that starts now would train"
        jobs.extend(job_ids)

    monkeypatch.setattr(cancel, "cancel_jobs", cancel_jobs)
    return jobs


def test_the_jobs_of_a_chain_end_and_its_record_says_so(run: RunDir, cancelled: list[str]) -> None:
    write_chain(run, ChainRecord(successor="8").with_link("7").with_link("8", "7"))
    for _ in range(2):  # a second time does no harm
        assert list(cancel_run(run)) == ["Cancelled what is left of 2 jobs: 7, 8."]
    assert cancelled == ["8", "7"] * 2
    record = read_chain(run)
    assert (record.successor, record.ended) == ("", "Cancelled by hpc-grpo cancel.")
    assert [link.job_id for link in record.links] == ["7", "8"]


def test_why_a_chain_gave_up_is_kept(run: RunDir, cancelled: list[str]) -> None:
    write_chain(run, ChainRecord(ended="No new checkpoint in 3 attempts.").with_link("7"))
    list(cancel_run(run))
    assert read_chain(run).ended == "No new checkpoint in 3 attempts."


def test_a_run_that_nothing_trains_has_only_its_stop(run: RunDir, cancelled: list[str]) -> None:
    assert list(cancel_run(run)) == ["Nothing of the run is waiting or running."]
    assert (cancelled, run.chain.exists()) == ([], False)


def test_a_process_on_this_machine_is_told_twice(
    run: RunDir, cancelled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(cancel.os, "kill", lambda pid, number: told.append((pid, number)))
    monkeypatch.setattr(cancel, "_BETWEEN_SIGNALS_S", 0.0)
    pid = os.getpid()
    write_json_atomic(run.holder, asdict(LockOwner(socket.gethostname(), pid, start_time(pid), "local1", 1, 0.0)))
    assert list(cancel_run(run)) == [f"Told process {pid} to end."]
    assert told == [(pid, signal.SIGTERM)] * 2  # the second does not wait for a checkpoint


def test_a_process_elsewhere_finds_the_stop(run: RunDir, cancelled: list[str]) -> None:
    write_json_atomic(run.holder, asdict(LockOwner("nid007", 1, 1, "17", 1, 0.0)))
    assert list(cancel_run(run)) == ["It was started by hand on nid007: the STOP file ends it there after its step."]
