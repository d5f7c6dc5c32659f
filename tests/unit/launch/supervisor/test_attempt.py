"""An attempt of a link, before its nodes are started."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo.config import load_config
from hpc_grpo.errors import ConfigError, LaunchError, RunHeldError
from hpc_grpo.launch.chain.link import LinkJob
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.launch.place.job_queue import job_python
from hpc_grpo.launch.supervisor import attempt
from hpc_grpo.run.attempt import AttemptRecord, read_attempts
from hpc_grpo.run.chain import read_chain
from hpc_grpo.run.lock import LockOwner, RunLock
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.signals import Signals
from tests.support.links import TELL, started, told
from tests.support.places import FakeJob, FakePlace, FakeQueue, allocation


def test_a_place_that_does_not_answer_is_asked_again() -> None:
    slept: list[float] = []
    assert attempt.allocation_of(FakePlace(silent=3), is_patient=True, sleep=slept.append) == FakePlace().nodes
    assert slept == [2.0, 10.0, 30.0]


def test_a_place_that_never_answers_is_an_error() -> None:
    slept: list[float] = []
    with pytest.raises(LaunchError, match="does not answer"):
        attempt.allocation_of(FakePlace(silent=99), is_patient=True, sleep=slept.append)
    assert sum(slept) == 102.0


def test_a_user_who_waits_is_told_at_once_that_the_place_does_not_answer() -> None:
    with pytest.raises(LaunchError, match="does not answer"):
        attempt.allocation_of(FakePlace(silent=1), is_patient=False)


def test_the_last_sign_of_life_of_a_killed_attempt_is_kept_as_its_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    killed, ended = (AttemptRecord(number, str(number), "slurm", [], 1.0, None, 1) for number in (1, 2))
    ended.end("crash", 1, "It crashed.")
    for record in (killed, ended):
        folder = run.attempt(record.attempt, record.job_id)
        folder.mkdir(parents=True)
        record.save(folder)
    for number in (1, 2):
        attempt.close_record(run, LockOwner("nid001", 1, 1, str(number), number, beat_at=77.0))
    assert [record.ended_at for record in read_attempts(run)] == [77.0, ended.ended_at]


def test_a_link_whose_nodes_are_never_known_leaves_two_jobs_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"run.root={tmp_path}", "launch.slurm.max_job_chains=null"]
    run = freeze(load_config("local/debug", settings), [], [])
    queue = FakeQueue(jobs={"17": FakeJob("17")})

    def silent(_place: FakePlace, is_patient: bool) -> None:
        raise LaunchError("The place does not answer.")

    monkeypatch.setattr(attempt, "allocation_of", silent)
    with pytest.raises(LaunchError, match="does not answer"):
        attempt.run_attempt(run, "hpc_grpo.driver.main", LinkJob("16"), FakePlace(queue=queue))
    assert queue.asked == ["submit 100 after 17", "submit 101 after 17 100"]


def test_a_rejected_config_ends_the_chain_before_there_is_an_attempt(tmp_path: Path) -> None:
    image = "launch.container={image: /no/such.sif, engine: apptainer, python: python3}"
    settings = [f"run.root={tmp_path}", "launch.slurm.max_job_chains=null", image, f"launch.notify={TELL}"]
    run = freeze(load_config("local/debug", settings), [], [])
    queue = FakeQueue(jobs={"17": FakeJob("17")})
    with pytest.raises(ConfigError, match=r"launch\.container"):
        attempt.run_attempt(run, "hpc_grpo.driver.main", LinkJob("16"), FakePlace(queue=queue))
    assert queue.cancelled == ["100", "101"]
    assert read_chain(run).ended.startswith("launch.container")
    assert told(run)[-1].startswith("ended: ")


def test_a_second_job_by_hand_leaves_the_chain_that_holds_the_run_as_it_was(tmp_path: Path) -> None:
    settings = [f"run.root={tmp_path}", "launch.slurm.max_job_chains=null"]
    run = freeze(load_config("local/debug", settings), [], [])
    queue = FakeQueue(jobs={"7": FakeJob("7"), "17": FakeJob("17")})
    started(run, queue, by_hand=True)
    before = read_chain(run)
    lock = RunLock.take(run, "7", 1)
    try:
        with pytest.raises(RunHeldError):
            attempt.run_attempt(run, "hpc_grpo.driver.main", LinkJob(by_hand=True), FakePlace(queue=queue))
    finally:
        lock.release()
    assert queue.asked[2:] == ["submit 102 after 17", "submit 103 after 17 102", "cancel 102 103"]
    assert read_chain(run) == before


def test_a_light_installation_on_the_login_node_starts_that_of_the_jobs_on_the_head_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"run.root={tmp_path}", "launch.python=/proj/env/bin/python"]
    run = freeze(load_config("local/debug", words), [], [])
    became: list[list[str]] = []

    def execvpe(_file: str, argv: list[str], _environ: dict[str, str]) -> None:
        became.append(argv)
        raise SystemExit(0)

    place = FakePlace(replace(allocation("nid001"), this_node=None), wrap=lambda node, command: [node, *command])
    monkeypatch.setattr(attempt.os, "execvpe", execvpe)
    monkeypatch.setitem(job_python.__globals__, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit):
        attempt.run_attempt(run, "hpc_grpo.driver.main", place=place)
    [command] = became
    assert command[0] == "nid001"
    inner = command[command.index("/proj/env/bin/python") :]
    assert inner[1:5] == ["-E", str(run.source_dir), "attempt", str(run.path)]


@pytest.mark.parametrize("code", [0, 78])
def test_who_must_come_back_from_the_head_node_sends_a_child_there(
    code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As `hpc-grpo model eval` in the shell that salloc leaves on the login node: it prints the answer itself."""
    run = freeze(load_config("local/debug", [f"run.root={tmp_path}"]), [], [])
    told = f"import sys; print('attempt', *sys.argv[-3:]); sys.exit({code})"
    place = FakePlace(
        replace(allocation("nid001"), this_node=None),
        wrap=lambda node, command: [sys.executable, "-c", told, node, *command],
    )
    with redirect_stdout(sys.stderr):
        assert attempt.run_attempt(run, "hpc_grpo.driver.evaluation", place=place, comes_back=True) == code
    out, err = capfd.readouterr()
    assert (out, err) == ("", "attempt --driver hpc_grpo.driver.evaluation --no-link\n")


def test_a_complete_run_is_not_trained_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = freeze(load_config("local/debug", [f"run.root={tmp_path}"]), [], [])
    run.complete_marker.touch()
    assert attempt.run_attempt(run, "hpc_grpo.driver.main", place=FakePlace(queue=None)) == 0
    assert "raise train.total_* to extend it" in capsys.readouterr().out
    assert read_attempts(run) == []


def warn_this_process() -> None:
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "it would end the tests"
    os.kill(os.getpid(), signal.SIGUSR1)


class FakeSupervisor:
    """Is warned of the end of walltime, and ends in time."""

    record = AttemptRecord(1, "7", "slurm", ["nid001"], 1.0, None, 1)

    def run(self) -> int:
        with Signals() as signals:
            warn_this_process()
            assert signals.pending == [signal.SIGUSR1]
        return 75


class FakeLink:
    """Is warned of the end of walltime while it looks after its successor; `done` is what it came to."""

    before = None

    def __init__(self) -> None:
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")

    def try_again(self) -> None: ...

    def finish(self, record: AttemptRecord) -> None:
        warn_this_process()
        self.done.append(f"finish attempt {record.attempt}")

    def tell(self) -> None:
        self.done.append("tell")


def test_a_warning_while_a_link_ends_does_not_keep_it_from_its_successor(tmp_path: Path) -> None:
    link = FakeLink()
    assert attempt.supervise(FakeSupervisor(), RunDir(tmp_path), link, FakePlace()) == 75
    assert link.done == ["start", "finish attempt 1", "tell"]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
