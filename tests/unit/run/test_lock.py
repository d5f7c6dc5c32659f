"""One attempt holds a run at a time: the owner that lives keeps it, one that is gone is replaced."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hpc_grpo.errors import EXIT_HELD, RunHeldError
from hpc_grpo.run import lock as lock_module
from hpc_grpo.run.files import write_json_atomic, write_record
from hpc_grpo.run.lock import (
    EndedJob,
    LockOwner,
    RunLock,
    abandoned_by,
    read_lock_owner,
    refuse_if_held,
    retire,
)
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.processes import start_time
from hpc_grpo.system.signals import Signals


def owner(host: str, pid: int, started: int, beat_at: float = 0.0) -> LockOwner:
    return LockOwner(host, pid, started, "17", 3, beat_at)


def test_a_run_is_held_until_it_is_released(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lock = RunLock.take(run, "17", 1)
    held = read_lock_owner(run)
    assert held is not None
    assert (held.pid, held.job_id, held.attempt) == (os.getpid(), "17", 1)
    with pytest.raises(RunHeldError, match="attempt 1") as refused:
        RunLock.take(run, "18", 2)
    assert refused.value.exit_code == EXIT_HELD
    lock.release()
    assert read_lock_owner(run) is None
    assert list(tmp_path.iterdir()) == []


def test_the_next_beat_tells_what_the_driver_does_and_since_when(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lock = RunLock.take(run, "17", 1)
    before = time.time()
    lock.note_work("train")
    lock.beat()
    first = read_lock_owner(run)
    assert first is not None
    assert (first.work, first.work_at >= before) == ("train", True)
    lock.note_work("train")
    lock.beat()
    assert (again := read_lock_owner(run)) is not None
    assert again.work_at == first.work_at
    lock.release()
    assert read_lock_owner(run) is None


def test_a_full_disk_keeps_nobody_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[Path] = []

    def full(path: Path, values: dict[str, object]) -> None:
        if not refused:
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_record(path, values)

    monkeypatch.setattr(lock_module, "write_record", full)
    run = RunDir(tmp_path)
    RunLock.take(run, "17", 1).release()
    assert len(refused) == 1
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_was_replaced_has_a_limited_time_for_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it runs: SIGTERM alone may give it as long as it takes."""
    monkeypatch.setattr(lock_module, "BEAT_S", 0.05)
    monkeypatch.setattr(lock_module, "_CHECKPOINT_S", 0.2)
    run = RunDir(tmp_path)
    with Signals() as signals:
        lock = RunLock.take(run, "17", 1)
        write_json_atomic(run.holder, asdict(owner("nid009", 5, 5)))
        deadline = time.monotonic() + 30.0
        while len(signals.pending) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        lock.release()
    assert signals.pending == [signal.SIGTERM, signal.SIGTERM]


def test_a_process_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_time(child.pid)
    assert started > 0
    child.communicate()
    write_json_atomic(run.holder, asdict(owner(socket.gethostname(), child.pid, started)))
    RunLock.take(run, "18", 4).release()


def test_another_process_with_the_same_id_holds_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json_atomic(run.holder, asdict(owner(socket.gethostname(), os.getpid(), started=1)))
    RunLock.take(run, "18", 4).release()


def test_an_owner_on_another_host_lives_while_it_beats(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json_atomic(run.holder, asdict(owner("nid007", 1, 1, beat_at=1.0)))

    def beats(_seconds: float) -> None:
        write_json_atomic(run.holder, asdict(owner("nid007", 1, 1, beat_at=2.0)))

    with pytest.raises(RunHeldError, match="on nid007"):
        RunLock.take(run, "18", 4, sleep=beats)
    slept: list[float] = []
    RunLock.take(run, "18", 4, sleep=slept.append).release()
    assert sum(slept) == 20.0


def test_the_job_before_is_not_waited_for_when_it_is_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json_atomic(run.holder, asdict(owner("nid007", 1, 1)))
    RunLock.take(run, "18", 4, before=EndedJob("17", is_gone=True), sleep=lambda _: pytest.fail("it waited")).release()


@pytest.mark.parametrize(("before", "is_left"), [("17", True), ("16", False)])
def test_what_a_killed_job_left_is_removed_where_nobody_goes_on(tmp_path: Path, before: str, is_left: bool) -> None:
    run = RunDir(tmp_path)
    write_json_atomic(run.holder, asdict(owner("nid007", 1, 1)))
    assert abandoned_by(run, EndedJob(before, is_gone=False)) is None
    assert abandoned_by(run, None) is None
    left = abandoned_by(run, EndedJob(before, is_gone=True))
    assert left == (read_lock_owner(run) if is_left else None)
    if left is not None:
        retire(run.holder, left)
        assert read_lock_owner(run) is None


def test_the_job_before_that_may_still_live_is_replaced_and_given_time_to_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json_atomic(run.holder, asdict(owner("nid007", 1, 1)))
    slept: list[float] = []

    def beats(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            write_json_atomic(run.holder, asdict(owner("nid007", 1, 1, beat_at=2.0)))

    lock = RunLock.take(run, "18", 4, before=EndedJob("17", is_gone=False), sleep=beats)
    assert slept == [1.0, 1.0, 1.0, 90.0]
    held = read_lock_owner(run)
    assert held is not None
    assert held.job_id == "18"  # which the one on nid007 finds, and ends
    lock.release()


def test_a_command_is_refused_while_the_owner_gives_signs_of_life(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    refuse_if_held(run)
    write_json_atomic(run.holder, asdict(owner("nid007", 1, 1, beat_at=time.time())))
    with pytest.raises(RunHeldError, match="hpc-grpo stop"):
        refuse_if_held(run)
    write_json_atomic(run.holder, {**json.loads(run.holder.read_text()), "beat_at": time.time() - 61})
    refuse_if_held(run)


def test_a_job_that_is_over_holds_the_run_while_its_processes_still_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for held, age_s, is_held in (
        (owner("nid007", 1, 1), 2, True),
        (owner("nid007", 1, 1), 25, False),
        (LockOwner.here("17", 1), 25, True),
    ):
        write_json_atomic(run.holder, asdict(replace(held, beat_at=time.time() - age_s)))
        with pytest.raises(RunHeldError) if is_held else nullcontext():
            refuse_if_held(run, is_over=lambda _owner: True)


def test_who_may_be_the_owner_restarted_watches_for_another_sign_of_life(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    slept: list[float] = []
    write_json_atomic(run.holder, asdict(owner("nid007", 1, 1, beat_at=time.time())))
    refuse_if_held(run, slept.append)
    assert sum(slept) == 20.0

    def beats(_seconds: float) -> None:
        write_json_atomic(run.holder, asdict(owner("nid007", 1, 1, beat_at=time.time())))

    with pytest.raises(RunHeldError):
        refuse_if_held(run, beats)


def test_of_two_that_find_a_dead_owner_one_gets_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json_atomic(run.holder, asdict(owner("nid007", 1, 1)))
    locks: list[RunLock] = []

    def faster(_seconds: float) -> None:
        if not locks:
            locks.append(RunLock.take(run, "17", 4, sleep=lambda _: None))

    with pytest.raises(RunHeldError):
        RunLock.take(run, "18", 5, sleep=faster)
    locks[0].release()


def test_a_fresh_owner_is_not_moved_away_for_a_dead_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    fresh = owner("nid008", 2, 2)
    write_json_atomic(run.holder, asdict(fresh))
    retire(run.holder, owner("nid007", 1, 1))
    assert read_lock_owner(run) == fresh
    assert [path.name for path in tmp_path.iterdir()] == ["holder.json"]


def test_a_damaged_file_holds_nothing_once_no_owner_has_mended_it_for_twenty_seconds(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.holder.write_text("")
    waits: list[float] = []
    RunLock.take(run, "18", 4, sleep=waits.append).release()
    assert sum(waits) == 20.0


def test_an_owner_that_was_taken_for_dead_leaves_the_others_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    lock = RunLock.take(run, "17", 1)
    other = owner("nid009", 5, 5)
    write_json_atomic(run.holder, asdict(other))
    lock.release()
    assert read_lock_owner(run) == other


def test_an_owner_beats_on_and_ends_itself_once_another_owns_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with Signals() as signals:
        lock = RunLock.take(run, "17", 1)
        write_json_atomic(run.holder, {**json.loads(run.holder.read_text()), "beat_at": 1.0})
        assert lock.beat()
        held = read_lock_owner(run)
        assert held is not None
        assert held.beat_at > 1.0
        write_json_atomic(run.holder, asdict(owner("nid009", 5, 5)))
        assert not lock.beat()
        lock.release()
        assert set(signals.pending) == {signal.SIGTERM}
    assert read_lock_owner(run) == owner("nid009", 5, 5)


def test_a_link_that_nfs_made_and_denied_is_the_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def answered_twice(source: Path, path: Path) -> None:
        link(source, path)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", answered_twice)
    lock = RunLock.take(RunDir(tmp_path), "17", 1)
    held = read_lock_owner(RunDir(tmp_path))
    assert held is not None
    assert held.pid == os.getpid()
    lock.release()


def test_an_owner_whose_file_is_damaged_has_time_to_write_it_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.holder.write_text("")

    def beats(_seconds: float) -> None:
        write_record(run.holder, asdict(owner(socket.gethostname(), os.getpid(), start_time(os.getpid()))))

    with pytest.raises(RunHeldError, match="attempt 3"):
        RunLock.take(run, "18", 4, sleep=beats)
    run.holder.write_text("")
    RunLock.take(run, "18", 4, sleep=lambda _seconds: None).release()


def test_an_owner_of_a_newer_version_that_writes_more_holds_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    living = owner(socket.gethostname(), os.getpid(), start_time(os.getpid()))
    write_record(run.holder, {**asdict(living), "colour": "b"})
    assert read_lock_owner(run) == living


def test_an_owner_in_another_container_of_this_hostname_is_not_judged_by_its_process(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    other = replace(LockOwner.here("17", 3), pid=1, pid_started=1, pid_namespace=7)
    assert not other.is_on_this_host
    write_json_atomic(run.holder, asdict(other))

    def beats(_seconds: float) -> None:
        write_json_atomic(run.holder, asdict(replace(other, beat_at=other.beat_at + 5.0)))

    with pytest.raises(RunHeldError):
        RunLock.take(run, "18", 4, sleep=beats)
    assert RunLock.take(run, "18", 4, asked=lambda owner: owner.pid != 1, sleep=beats).release() is None


def test_an_owner_that_was_written_before_containers_were_told_apart_is_on_this_host() -> None:
    assert owner(socket.gethostname(), os.getpid(), 1).is_on_this_host
