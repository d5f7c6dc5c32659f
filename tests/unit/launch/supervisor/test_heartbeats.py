"""Heartbeats to agents that are `cat`: an srun of ours writes down what it is sent."""

from __future__ import annotations

import fcntl
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from hpc_grpo.launch.agent.protocol import NodeSpec, spec_from_line
from hpc_grpo.launch.supervisor.agent_link import NodeLink
from tests.support.places import FakePlace

DEADLINE_S = 30.0
PIPE_BYTES = 65536

SUPERVISE = """
import sys
from pathlib import Path
from hpc_grpo.config import load_config
from hpc_grpo.launch.supervisor import heartbeats
from hpc_grpo.launch.supervisor.supervisor import Supervisor
from tests.support.places import FakePlace
from hpc_grpo.run.paths import RunDir
heartbeats.HEARTBEAT_S = 0.05
config = load_config("local/debug", [f"run.root={sys.argv[1]}"])
driver = [sys.executable, "-c", "import sys; print('x' * 200000); sys.exit(75)"]
place = FakePlace(wrap=lambda node, command: ["srun"])
sys.exit(Supervisor(RunDir(config.run_path), config, place, driver, Path.cwd()).run())
"""


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the agent was sent, once a file `reads` lets it read."""
    received = tmp_path / "received"
    srun = tmp_path / "srun"
    srun.write_text(f"#!/bin/bash\nwhile [[ ! -e {tmp_path}/reads ]]; do sleep 0.05; done\nexec cat > {received}\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return received


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"after {DEADLINE_S:.0f} s still not true: {what}"
        time.sleep(0.01)


def waiting_bytes(pipe: IO[bytes]) -> int:
    return int(struct.unpack("i", fcntl.ioctl(pipe.fileno(), termios.FIONREAD, b"\0" * 4))[0])


def test_they_go_on_while_the_supervisor_hangs_in_a_write(tmp_path: Path, received: Path) -> None:
    """The driver prints more than the pipe of the job's output takes, and nobody reads it."""
    (tmp_path / "reads").touch()
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISE, str(tmp_path)], stdout=subprocess.PIPE)
    output = supervisor.stdout
    assert output is not None
    try:
        wait_until(lambda: waiting_bytes(output) > PIPE_BYTES // 2, "the job's output fills its pipe")
        before = received.stat().st_size
        wait_until(lambda: received.stat().st_size >= before + 20, "heartbeats arrive")
        assert b"x" * 200000 in output.read()
        assert supervisor.wait(DEADLINE_S) == 75
    finally:
        supervisor.kill()
        supervisor.wait()


def test_they_neither_wait_for_a_spec_that_is_being_written_nor_fall_into_it(tmp_path: Path, received: Path) -> None:
    link = NodeLink(FakePlace(wrap=lambda _node, _command: ["srun"]), "nid001", tmp_path / "logs")
    spec = NodeSpec("n1", "17-1-0", "", "/token", "/logs", "/work", None, True, None, 1.0, {"MUCH": "x" * 200000})
    assert link.process.stdin is not None
    writer = threading.Thread(target=link.send_spec, args=[spec], daemon=True)
    writer.start()
    wait_until(lambda: waiting_bytes(link.process.stdin) == PIPE_BYTES, "the agent's pipe is full")
    beats = threading.Thread(target=lambda: [link.heartbeat() for _ in range(10)], daemon=True)
    beats.start()
    beats.join(DEADLINE_S)
    has_waited = beats.is_alive()
    (tmp_path / "reads").touch()
    writer.join(DEADLINE_S)
    link.heartbeat()
    link.release()
    assert link.wait(time.monotonic() + DEADLINE_S)
    assert not has_waited
    line, *beats_after = received.read_bytes().split(b"\n")
    assert spec_from_line(line) == spec
    assert beats_after == [b"", b""]
