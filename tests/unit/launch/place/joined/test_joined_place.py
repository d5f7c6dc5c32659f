"""The head waits for its workers, names who is missing, and runs agents over their connections."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_grpo import __version__
from hpc_grpo.config import LaunchConfig
from hpc_grpo.errors import EXIT_COMPLETE, EXIT_CRASH, EXIT_RESUMABLE, ConfigError, EndAskedError, NodesUnavailableError
from hpc_grpo.launch.place import find_place
from hpc_grpo.launch.place.base import LOST_CODE, End
from hpc_grpo.launch.place.joined import place as module
from hpc_grpo.launch.place.joined.connection import LEFT, Hello, find_token, make_token, prove_to_head
from hpc_grpo.launch.place.joined.place import HEAD_VARIABLE, JoinedPlace
from hpc_grpo.launch.place.joined.worker import Worker
from hpc_grpo.run.attempt import AttemptRecord
from hpc_grpo.run.paths import RunDir
from hpc_grpo.system.proof import read_exactly

TOKEN = "0123456789abcdef"
ENVIRON = {HEAD_VARIABLE: "1", "HPC_GRPO_TOKEN": TOKEN, "RUNPOD_POD_ID": "pod1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinedPlace]:
    monkeypatch.setattr(module, "_FIRST_WAIT_S", 0.2)
    made = JoinedPlace(ENVIRON)
    launch = LaunchConfig(num_nodes=3, rejoin_s=0.0)
    made.for_run(RunDir(tmp_path), launch.model_copy(update={"port": 0}))
    made._opened()
    yield made
    made.close(End("node_lost", 69, "The test is over."))


def worker(place: JoinedPlace, name: str) -> socket.socket:
    """A worker that the gate has let in."""
    gate = place._opened()
    connection = socket.create_connection(("127.0.0.1", gate.port), timeout=60.0)
    prove_to_head(connection, TOKEN.encode())
    connection.sendall(Hello(name, name, __version__).to_line())
    wait_for(lambda: name in gate.waiting())
    return connection


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_environment_of_a_head_shows_the_place() -> None:
    assert find_place(ENVIRON).name == "joined"
    assert set(JoinedPlace(ENVIRON).start_environment(ENVIRON)) == {"RUNPOD_POD_ID", "CUDA_VISIBLE_DEVICES"}


def test_head_and_workers_are_the_nodes_in_the_order_of_their_names(place: JoinedPlace) -> None:
    held = [worker(place, name) for name in ("pod3", "pod2")]
    found = place.allocation()
    assert found.nodes == ("pod1", "pod2", "pod3")
    assert found.this_node == "pod1"
    assert len(held) == 2


def test_who_is_missing_is_named_by_the_attempt_before(place: JoinedPlace, tmp_path: Path) -> None:
    record = AttemptRecord(1, "joined7", "joined", ["pod1", "pod2", "pod3"], 0.0, None, 7)
    folder = RunDir(tmp_path).attempt(1, "joined7")
    folder.mkdir(parents=True)
    record.save(folder)
    held = worker(place, "pod3")
    with pytest.raises(NodesUnavailableError, match="missing: pod2") as raised:
        place.allocation()
    assert raised.value.nodes == ("pod2",)
    held.close()


def test_after_the_deadline_fewer_nodes_do_where_the_config_allows(place: JoinedPlace) -> None:
    place._launch = place._launch.model_copy(update={"min_nodes": 2})
    held = worker(place, "pod2")
    assert place.allocation().nodes == ("pod1", "pod2")
    held.close()


def test_a_program_of_a_worker_has_the_connection_as_its_pipes(place: JoinedPlace, tmp_path: Path) -> None:
    held = [worker(place, "pod2"), worker(place, "pod3")]
    place.allocation()
    log = tmp_path / "agent.log"
    with log.open("wb") as file:
        process = place.connection("pod2", ["python", "-E", "-m", "hpc_grpo.x"], file)
    assert process is not None
    assert process.stdout is not None
    assert process.stdin is not None
    assert read_exactly(held[0], 46) == b'{"run": ["-m", "hpc_grpo.x"], "node": "pod2"}\n'
    assert process.poll() is None
    process.stdin.close()
    assert held[0].recv(1) == b""
    held[0].sendall(b"gone\n")
    held[0].close()
    assert process.poll() is None  # not before what it said was read
    assert isinstance(process.stdout, socket.socket)
    process.stdout.setblocking(True)
    assert read_exactly(process.stdout, 5) == b"gone\n"
    assert process.wait(timeout=60.0) == LOST_CODE
    assert place.is_node_failure(f"its agent ended with exit code {LOST_CODE}: {log.read_text()}")


def test_a_killed_program_of_a_worker_ends_whatever_it_still_said(place: JoinedPlace, tmp_path: Path) -> None:
    held = [worker(place, "pod2"), worker(place, "pod3")]
    place.allocation()
    with (tmp_path / "agent.log").open("wb") as file:
        process = place.connection("pod2", ["python", "-m", "hpc_grpo.x"], file)
    assert process is not None
    held[0].sendall(b"more than anybody reads\n" * 100)
    process.kill()
    assert process.wait(timeout=60.0) == LOST_CODE


def test_the_head_itself_has_an_agent_of_its_own(place: JoinedPlace) -> None:
    assert place.connection("pod1", ["agent"], io.BytesIO()) is None
    assert place.start_command("pod1", ["agent"]) == ["agent"]


def test_each_head_makes_a_token_and_one_of_the_environment_wins(tmp_path: Path) -> None:
    file = tmp_path / ".secret" / "join_token"
    assert find_token(file, {}) is None
    first = make_token(file, {})
    made = make_token(file, {})
    assert made != first
    assert make_token(file, {}, anew=False) == made == find_token(file, {})
    assert make_token(file, {"HPC_GRPO_TOKEN": TOKEN}) == TOKEN.encode()
    assert file.read_bytes() == made
    assert (len(made), file.stat().st_mode & 0o777) == (64, 0o600)
    assert find_token(file, {"HPC_GRPO_TOKEN": TOKEN}) == TOKEN.encode()
    with pytest.raises(ConfigError, match="openssl rand"):
        find_token(file, {"HPC_GRPO_TOKEN": "short"})


def test_a_worker_that_has_left_since_it_joined_is_an_agent_that_has_ended(place: JoinedPlace, tmp_path: Path) -> None:
    held = [worker(place, "pod2"), worker(place, "pod3")]
    place.allocation()
    for connection in held:
        connection.close()
    wait_for(lambda: not place._opened().waiting())
    with (tmp_path / "agent.log").open("wb") as log:
        process = place.connection("pod2", ["python", "-E", "-m", "hpc_grpo.x"], log)
    assert process is not None
    assert process.wait(timeout=60.0) == LOST_CODE


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("step", "code"), [(0, EXIT_CRASH), (7, EXIT_RESUMABLE)])
def test_a_signal_while_workers_are_awaited_ends_with_75_where_a_checkpoint_is(
    place: JoinedPlace, monkeypatch: pytest.MonkeyPatch, step: int, code: int, number: int
) -> None:
    place._launch = place._launch.model_copy(update={"rejoin_s": 4.0})
    monkeypatch.setattr(module, "newest_step", lambda _run: step)
    monkeypatch.setattr(module, "say", lambda _text: os.kill(os.getpid(), number))
    with pytest.raises(EndAskedError, match="1 of 3 nodes are here") as raised:
        place.allocation()
    assert raised.value.exit_code == code


def test_the_stop_file_ends_the_wait_for_workers(place: JoinedPlace, tmp_path: Path) -> None:
    RunDir(tmp_path).stop_marker.touch()
    with pytest.raises(EndAskedError):
        place.allocation()


@pytest.mark.parametrize(("rejoin_s", "first_s"), [(0.0, 1800.0), (120.0, 1800.0), (240.0, 3600.0)])
def test_the_first_wait_for_workers_is_half_an_hour_or_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rejoin_s: float, first_s: float
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(JoinedPlace, "_wait_for_workers", lambda *given: waits.append(given[2]))
    new = JoinedPlace(ENVIRON)
    new.for_run(RunDir(tmp_path), LaunchConfig(num_nodes=3, rejoin_s=rejoin_s))
    new.allocation()
    assert waits == [first_s]


def test_an_end_is_told_to_nobody_where_another_head_has_the_port(place: JoinedPlace, tmp_path: Path) -> None:
    second = JoinedPlace(ENVIRON)
    second.for_run(RunDir(tmp_path), LaunchConfig(num_nodes=3, port=place._opened().port))
    second.close(End("complete", 0, "The run is complete."))


def test_a_worker_that_was_told_to_end_is_a_node_that_has_gone(place: JoinedPlace) -> None:
    assert place.is_node_failure(f"SIGINT {LEFT}")
    assert not place.is_node_failure("ray start failed 3 times")


def test_an_allocation_without_the_lost_is_not_enough(place: JoinedPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REDIAL_S", 0.1)
    held = [worker(place, "pod2"), worker(place, "pod3")]
    before = place.allocation()
    held.pop().close()
    wait_for(lambda: len(place._opened().waiting()) < 2)
    with pytest.raises(NodesUnavailableError, match="nodes are here"):
        place.remaining(replace(before, nodes=("pod1", "pod2", "pod9")), ["pod1"], lambda: True)
    assert held


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_does_not_change_the_exit_code_of_a_worker_that_ends(tmp_path: Path) -> None:
    worker = Worker(RunDir(tmp_path), "127.0.0.1", 1, lambda: True)
    assert worker.serve() == 0
    signal.raise_signal(signal.SIGTERM)
    assert not [*RunDir(tmp_path).members.glob("*")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_worker_that_waits_for_its_head(tmp_path: Path, number: int) -> None:
    def is_over() -> bool:
        signal.raise_signal(number)
        return False

    assert Worker(RunDir(tmp_path), "127.0.0.1", 1, is_over).serve() == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_has_a_worker_end_its_agent_and_tell_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    head, connection = socket.socketpair()
    agent = tmp_path / "agent"
    agent.write_text(f"#!/bin/sh\nkill -{number} $PPID\ncat\ntouch {tmp_path}/ended\n")
    agent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(agent))
    monkeypatch.setattr(Worker, "_dial", lambda _worker: connection)
    head.sendall(json.dumps({"run": ["-m", "hpc_grpo.launch.agent.program"]}).encode() + b"\n")
    assert Worker(RunDir(tmp_path), "127.0.0.1", 1, lambda: False).serve() == EXIT_RESUMABLE
    assert (tmp_path / "ended").exists()
    assert json.loads(head.makefile().readline())["why"] == f"{signal.Signals(number).name} {LEFT}"


def test_a_head_that_hangs_up_is_dialed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.launch.place.joined.worker._REDIAL_S", 0.0)
    monkeypatch.setenv("HPC_GRPO_TOKEN", TOKEN)
    dialed = 0

    def is_over() -> bool:
        return dialed == 20  # more often than a token may be refused

    def hang_up(address: object, timeout: float) -> socket.socket:
        nonlocal dialed
        dialed += 1
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    monkeypatch.setattr(socket, "create_connection", hang_up)
    assert Worker(RunDir(tmp_path), "127.0.0.1", 1, is_over).serve() == EXIT_COMPLETE
