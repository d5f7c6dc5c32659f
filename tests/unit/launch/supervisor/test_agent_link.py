"""The supervisor's end of an agent that is `cat`: it writes down what it is sent."""

from __future__ import annotations

import fcntl
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import IO

import pytest

from hpc_grpo.launch.agent.protocol import NodeReport, NodeSpec
from hpc_grpo.launch.supervisor import agent_link
from hpc_grpo.launch.supervisor.agent_link import AgentLink
from hpc_grpo.launch.supervisor.transitions import Loss
from tests.support.places import FakePlace
from tests.support.processes import DEADLINE_S, wait_until

PIPE_BYTES = 65536

SUPERVISE = """
import sys
from pathlib import Path
from hpc_grpo.launch.supervisor import agent_link
from hpc_grpo.launch.supervisor.attempt_setup import AttemptSetup
from hpc_grpo.launch.supervisor.nodes import Nodes
from hpc_grpo.launch.supervisor.supervisor import Supervisor
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config
from tests.support.places import FakePlace
agent_link.HEARTBEAT_S = 0.05
place = FakePlace(wrap=lambda node, command: [sys.argv[2]])
run = RunDir(Path(sys.argv[1]) / "run")
setup = AttemptSetup(run, minimal_config().launch, place, place.allocation(), 1, Path.cwd())
driver = [sys.executable, "-c", "import sys; print(('x' * 99 + chr(10)) * 2000); sys.exit(75)"]
sys.exit(Supervisor(setup, Nodes(setup), driver).run())
"""


@pytest.fixture
def agent(tmp_path: Path) -> Path:
    """An agent that writes what it is sent to `received`, once a file `reads` lets it read."""
    agent = tmp_path / "agent"
    wait = f"while [[ ! -e {tmp_path}/reads ]]; do sleep 0.05; done"
    agent.write_text(f"#!/bin/bash\n{wait}\nexec cat > {tmp_path}/received\n")
    agent.chmod(0o755)
    return agent


def waiting_bytes(pipe: IO[bytes]) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe.fileno(), termios.FIONREAD, b"\0" * 4))[0])


def test_heartbeats_go_on_while_the_supervisor_hangs_in_a_write(tmp_path: Path, agent: Path) -> None:
    """The driver prints more than the pipe of the job's output takes, and nobody reads it."""
    (tmp_path / "reads").touch()
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(tmp_path), str(agent)], stdout=subprocess.PIPE)
    received, output = tmp_path / "received", supervisor.stdout
    assert output is not None
    try:
        wait_until(lambda: waiting_bytes(output) > PIPE_BYTES // 2, "the job's output fills its pipe")
        before = received.stat().st_size
        wait_until(lambda: received.stat().st_size >= before + 20, "heartbeats arrive")
        assert output.read().count(b"x" * 99) == 2000
        assert supervisor.wait(DEADLINE_S) == 75
    finally:
        supervisor.kill()
        supervisor.wait()


def test_heartbeats_neither_wait_for_a_spec_that_is_being_written_nor_fall_into_it(tmp_path: Path, agent: Path) -> None:
    link = AgentLink(FakePlace(wrap=lambda _node, _command: [str(agent)]), "nid001", tmp_path / "logs")
    spec = NodeSpec("n1", "17-1-0", "", "/token", "/logs", "/work", None, True, None, 1.0, {"MUCH": "x" * 200000})
    assert link.process.stdin is not None
    writer = threading.Thread(target=link.send_spec, args=[spec], daemon=True)
    writer.start()
    wait_until(lambda: waiting_bytes(link.process.stdin) == PIPE_BYTES, "the agent's pipe is full")
    beats = threading.Thread(target=lambda: [link.send(waits=False) for _ in range(10)], daemon=True)
    beats.start()
    beats.join(DEADLINE_S)
    has_waited = beats.is_alive()
    (tmp_path / "reads").touch()
    writer.join(DEADLINE_S)
    link.send(waits=False)
    link.release()
    assert link.wait(time.monotonic() + DEADLINE_S)
    assert not has_waited
    line, *beats_after = (tmp_path / "received").read_bytes().split(b"\n")
    assert NodeSpec.from_line(line) == spec
    assert beats_after == [b"", b""]


@pytest.mark.parametrize("says", [NodeReport("up", "nid001").to_line().decode().strip(), "alive"])
def test_an_agent_that_is_stopped_is_a_node_that_is_lost_also_before_ray_is_up(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_link, "SILENT_AGENT_S", 3.0)
    agent = tmp_path / "agent"
    signs = "while read -t 0.1 || [[ $? -gt 128 ]]; do echo alive; done"
    agent.write_text(f"#!/bin/bash\necho a module is loaded\nsleep 3.3\necho '{says}'\n{signs}\n")
    agent.chmod(0o755)
    link = AgentLink(FakePlace(wrap=lambda _node, _command: [str(agent)]), "nid001", tmp_path / "logs")

    def loss() -> Loss | None:
        link.read_reports()
        return link.loss()

    try:
        wait_until(lambda: loss() is not None or link._has_begun, "the agent has begun")
        begun = time.monotonic()
        while time.monotonic() - begun < 3.5:  # longer than its lease
            assert loss() is None
            time.sleep(0.05)
        link.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: loss() is not None, "its silence is noticed")
        lost = loss()
        assert lost is not None
        assert lost.why.startswith("its agent gave no sign of life for ")
        assert lost.is_machine
        link.release()
        assert link.wait(time.monotonic() + DEADLINE_S), "it wakes to tear down"
    finally:
        link.process.kill()
        link.process.wait()


@pytest.mark.parametrize(("why", "is_there"), [("Ray ended by itself", True), ("node failure: SIGINT ended it", False)])
def test_a_node_that_says_that_it_leaves_is_gone_although_it_tore_down_in_order(
    why: str, is_there: bool, tmp_path: Path
) -> None:
    agent = tmp_path / "agent"
    reports = [NodeReport("failed", "nid001", why=why), NodeReport("gone", "nid001")]
    agent.write_text("#!/bin/bash\n" + "".join(f"echo '{report.to_line().decode().strip()}'\n" for report in reports))
    agent.chmod(0o755)
    link = AgentLink(FakePlace(wrap=lambda _node, _command: [str(agent)]), "nid001", tmp_path / "logs")
    link.release()
    assert link.wait(time.monotonic() + DEADLINE_S)
    assert link.node_answers() == is_there
