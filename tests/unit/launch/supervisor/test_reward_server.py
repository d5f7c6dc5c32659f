"""A reward server is healthy before training, started again when it dies, and told of with its log when it is not."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from hpc_grpo.config.launch import RewardServerConfig
from hpc_grpo.errors import EXIT_UNAVAILABLE, NodesUnavailableError
from hpc_grpo.launch.supervisor.reward_server import RewardServer


def asked(command: list[str], port: int = 9, deadline_s: float = 30.0) -> RewardServerConfig:
    url = f"http://127.0.0.1:{port}/"
    return RewardServerConfig(command=command, health_url=url, deadline_s=deadline_s)


def test_a_server_that_ends_before_it_answers_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = RewardServer(asked(["sh", "-c", "echo no such model; exit 3"]), tmp_path / "log", tmp_path)
    with pytest.raises(NodesUnavailableError, match=r"(?s)exit code 3.*no such model") as raised:
        server.wait_until_healthy(lambda: True)
    assert raised.value.exit_code == EXIT_UNAVAILABLE


def test_a_server_that_never_answers_is_waited_for_until_its_deadline(tmp_path: Path) -> None:
    server = RewardServer(asked(["sleep", "60"], deadline_s=0.2), tmp_path / "log", tmp_path)
    assert not server.wait_until_healthy(lambda: False)
    with pytest.raises(NodesUnavailableError, match="did not answer"):
        server.wait_until_healthy(lambda: True)
    server._process.kill()
    server._process.wait()


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodesUnavailableError, match="no-such-program"):
        RewardServer(asked(["no-such-program"]), tmp_path / "log", tmp_path)


def test_a_server_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    server = RewardServer(asked(command, port), tmp_path / "log", tmp_path)
    server.wait_until_healthy(lambda: True)
    first = server._process.pid
    server.keep_alive()
    assert server._process.pid == first
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 30.0
    while server._process.pid == first:
        server.keep_alive()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    server.wait_until_healthy(lambda: True)
    server._process.kill()
    server._process.wait()
