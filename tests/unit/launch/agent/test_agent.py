from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest

from hpc_grpo.launch.agent import agent as node
from hpc_grpo.launch.agent import watch
from hpc_grpo.launch.agent.agent import NodeAgent
from hpc_grpo.launch.agent.folders import OwnedDir, shm_dir_path
from hpc_grpo.launch.agent.protocol import Lease, NodeSpec, Order, report_from_line
from hpc_grpo.launch.agent.watch import Watched
from hpc_grpo.system.processes import ProcessIdentity, hold_on, start_time

SPEC = NodeSpec("n1", "17-1-0", "", "/token", "/logs", "/work", None, True, None, 1.0, env={"A": "b"})


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeAgent]:
    """One whose logs cannot be written, and which ends no process of this test.

    With the supervisor's ends of its pipes.
    """
    monkeypatch.setattr(node, "end_processes", lambda *_: None)
    (tmp_path / "full").touch()
    handlers = {sig: signal.getsignal(sig) for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    orders, supervisor = os.pipe()
    reported, writer = os.pipe()
    with os.fdopen(writer, "wb") as reports:
        agent: Any = NodeAgent(replace(SPEC, log_dir=str(tmp_path / "full" / "logs")), Lease(orders), reports)
        agent.supervisor, agent.reported = supervisor, reported
        yield agent
    for descriptor in (orders, supervisor, reported):
        os.close(descriptor)
    for sig, handler in handlers.items():
        signal.signal(sig, handler)


def test_an_agent_that_cannot_write_its_logs_says_so_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    with TemporaryDirectory(dir="/tmp", prefix="hgt") as short:
        tag = f"t{os.getpid()}-1-0"
        log_dir = str(tmp_path / "full" / "logs")
        spec = replace(SPEC, tag=tag, local_dir=short, working_dir=str(tmp_path), log_dir=log_dir, interface=None)
        command = [sys.executable, "-m", "hpc_grpo.launch.agent.agent"]
        done = subprocess.run(command, input=spec.to_line(), capture_output=True, timeout=60, check=False)
        reports = [report for line in done.stdout.splitlines() if (report := report_from_line(line))]
        assert ([report.event for report in reports], done.returncode) == (["gone"], 0), done.stderr.decode()
        assert f"'{log_dir}/ray_start.log'" in done.stderr.decode()
        assert list(Path(short).iterdir()) == []
        assert not shm_dir_path(tag).exists()


def test_a_node_whose_head_never_comes_up_leaves_nothing(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/tmp", prefix="hgt") as short:
        tag = f"j{os.getpid()}-1-0"
        spec = replace(
            SPEC, tag=tag, head_address=None, local_dir=short, working_dir=str(tmp_path), log_dir=str(tmp_path)
        )
        command = [sys.executable, "-m", "hpc_grpo.launch.agent.agent"]
        done = subprocess.run(command, input=spec.to_line(), capture_output=True, timeout=60, check=False)
        reports = [report for line in done.stdout.splitlines() if (report := report_from_line(line))]
        assert ([report.event for report in reports], done.returncode) == (["gone"], 0), done.stderr.decode()
        assert list(Path(short).iterdir()) == []


def test_a_ray_that_ended_is_told_before_the_teardown_which_may_take_its_time(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that ended for it would be started again on that Ray."""
    told_by_then: list[str] = []

    def tear_down() -> int:
        os.set_blocking(agent.reported, False)  # type: ignore[attr-defined]
        told_by_then.append(os.read(agent.reported, 65536).decode())  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(agent, "_serve", lambda: "Ray ended by itself")
    monkeypatch.setattr(agent, "_tear_down", tear_down)
    assert agent.run() == 1
    assert "Ray ended by itself" in told_by_then[0]


def test_folders_go_though_the_logs_cannot_be_copied(
    agent: NodeAgent, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    temp_dir, shm_dir = tmp_path / "hg-temp", tmp_path / "hg-shm"
    agent._dirs = [OwnedDir(temp_dir), OwnedDir(shm_dir)]
    logs = temp_dir / "r" / "session_latest" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("said something")
    agent._tear_down()
    assert not temp_dir.exists()
    assert not shm_dir.exists()
    assert "Ray's logs were not copied" in capfd.readouterr().err


def test_a_process_that_has_just_ended_does_not_keep_the_others_from_their_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def kill(pid: int, _sig: int) -> None:
        if pid == 11:
            raise ProcessLookupError
        asked.append(pid)

    monkeypatch.setattr(watch, "catches", lambda *_: True)
    monkeypatch.setattr(watch.os, "kill", kill)
    watch.ask_for_stacks([11, 12])
    assert asked == [12]


def test_an_agent_names_and_ends_what_is_stopped_when_it_is_ordered_to(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    learner.send_signal(signal.SIGSTOP)
    os.waitpid(learner.pid, os.WUNTRACED)
    monkeypatch.setattr(node, "_STACKS_S", 0.0)
    agent._watch.late([Watched("learner", learner.pid, start_time(learner.pid))])
    os.write(agent.supervisor, Order.NAME_STOPPED.value)  # type: ignore[attr-defined]
    assert agent._goes_on()
    report = report_from_line(os.read(agent.reported, 4096))  # type: ignore[attr-defined]
    assert report is not None
    assert report.why.startswith(f"The learner (process {learner.pid}) was stopped for 0 s")
    assert learner.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(("silent_s", "is_woken"), [(20.0, False), (31.0, True)])
def test_an_agent_lets_a_supervisor_go_on_that_was_stopped(agent: NodeAgent, silent_s: float, is_woken: bool) -> None:
    """Before its lease of 60 s is over."""
    program = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    here = ProcessIdentity.of_this_process()
    supervisor = replace(here, pid=program.pid, pid_started=start_time(program.pid))
    agent._spec = replace(agent._spec, supervisor=supervisor)
    assert NodeSpec.from_line(agent._spec.to_line()).supervisor == supervisor
    try:
        program.send_signal(signal.SIGSTOP)
        os.waitpid(program.pid, os.WUNTRACED)
        agent._lease._heard -= silent_s
        assert agent._goes_on()
        assert (hold_on(program.pid) == "") == is_woken
    finally:
        program.kill()
        program.wait()


def told(agent: NodeAgent, *orders: bytes, number: int = signal.SIGTERM) -> bool:
    """Send this process a signal and the agent `orders`; return whether it goes on."""
    signal.raise_signal(number)
    goes_on = agent._goes_on()
    for order in orders:
        os.write(agent.supervisor, order)  # type: ignore[attr-defined]
        goes_on = agent._goes_on()
    return goes_on


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("orders", "goes_on"),
    [
        pytest.param([b"\n"], True, id="the supervisor lives, and may need the node"),
        pytest.param([b"\n", b"let go\n"], False, id="until it is let go"),
    ],
)
def test_an_agent_told_to_end_asks_the_supervisor(
    agent: NodeAgent, number: int, orders: list[bytes], goes_on: bool
) -> None:
    assert told(agent, *orders, number=number) == goes_on
    assert agent._is_urgent
    agent._reports.flush()
    line = os.read(agent.reported, 4096)  # type: ignore[attr-defined]
    report = report_from_line(line.rstrip())
    assert report is not None
    assert report.event == "told"


def test_an_agent_that_may_go_ends_at_the_signal_that_follows(agent: NodeAgent) -> None:
    os.write(agent.supervisor, b"let go\n")  # type: ignore[attr-defined]
    assert agent._goes_on()
    signal.raise_signal(signal.SIGTERM)
    assert not agent._goes_on()


def test_an_agent_that_nobody_listens_to_ends(agent: NodeAgent) -> None:
    class Closed:
        def write(self, _line: bytes) -> None:
            raise BrokenPipeError

    agent._reports = Closed()  # type: ignore[assignment]
    signal.raise_signal(signal.SIGTERM)
    assert not agent._goes_on()


def test_an_agent_that_ends_already_hurries_once_it_is_told_to_end(agent: NodeAgent) -> None:
    class DrainingRay:
        graces: ClassVar[list[float]] = []

        def terminate(self, grace_s: Callable[[], float]) -> None:
            self.graces.append(grace_s())
            signal.raise_signal(signal.SIGTERM)
            self.graces.append(grace_s())

    agent._ray = DrainingRay()  # type: ignore[assignment]
    agent._tear_down()
    assert DrainingRay.graces == [node._END_GRACE_S, node._URGENT_GRACE_S]
