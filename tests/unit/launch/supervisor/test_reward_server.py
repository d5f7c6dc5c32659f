"""A reward server is healthy before training, started again when it dies, and told of with its log when it is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_grpo.config.launch import RewardServerConfig
from hpc_grpo.errors import EXIT_UNAVAILABLE, NodesUnavailableError
from hpc_grpo.launch.supervisor.reward_server import RewardServer
from hpc_grpo.system.process_tree import listeners
from tests.support.processes import free_port
from tests.support.second_user import LISTENER, NOBODY, as_second_user


def asked(command: list[str], port: int = 9) -> RewardServerConfig:
    return RewardServerConfig(command=command, health_url=f"http://127.0.0.1:{port}/")


def test_a_server_that_ends_before_it_answers_ends_the_run_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = RewardServer(asked(["sh", "-c", "echo no such model; exit 3"]), 30.0, tmp_path / "log", tmp_path)
    with pytest.raises(NodesUnavailableError, match=r"(?s)exit code 3.*no such model") as raised:
        server.wait_until_healthy(lambda: True)
    assert raised.value.exit_code == EXIT_UNAVAILABLE


def test_a_server_that_never_answers_is_waited_for_until_its_deadline(tmp_path: Path) -> None:
    server = RewardServer(asked(["sleep", "60"]), 0.2, tmp_path / "log", tmp_path)
    assert not server.wait_until_healthy(lambda: False)
    with pytest.raises(NodesUnavailableError, match="did not answer"):
        server.wait_until_healthy(lambda: True)
    server._process.kill()
    server._process.wait()


def test_a_command_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NodesUnavailableError, match="no-such-program"):
        RewardServer(asked(["no-such-program"]), 30.0, tmp_path / "log", tmp_path)


FILES = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1"]


def end(server: RewardServer) -> None:
    server._process.kill()
    server._process.wait()


def supervise(script: str, port: int, folder: Path) -> subprocess.Popen[str]:
    """Run `script` on a reward server in a process of its own, to which the test's other processes do not belong."""
    words = [sys.executable, "-c", f"{SUPERVISOR}{script}", str(port), str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path.cwd())


SUPERVISOR = """
import os, signal, sys, time
from pathlib import Path
from hpc_grpo.launch.supervisor.reward_server import RewardServer
from hpc_grpo.system.processes import adopt_orphans
from tests.unit.launch.supervisor.test_reward_server import CHILD_KEEPS_PORT, FILES, asked, end
port, folder = int(sys.argv[1]), Path(sys.argv[2])
adopt_orphans()
def start(*command):
    return RewardServer(asked([*command], port), 30.0, folder / "log", folder)
def restart(server):
    first = server._process.pid
    os.kill(first, signal.SIGKILL)
    while server._process.pid == first:
        server.keep_alive()
        time.sleep(0.05)
"""


def test_a_port_that_another_user_holds_is_refused_though_it_answers(tmp_path: Path) -> None:
    with as_second_user(LISTENER, str(port := free_port())):
        said, _ = supervise("start(*FILES, str(port)).wait_until_healthy(lambda: True)", port, tmp_path).communicate(
            timeout=120
        )
    assert f"port {port}: a process of user {NOBODY} listens there" in said


def test_a_port_that_another_process_of_the_user_holds_is_refused_too(tmp_path: Path) -> None:
    """That of another run's server, say: it would score this run's completions."""
    port = free_port()
    other = subprocess.Popen([*FILES, str(port)], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 30.0
        while not listeners(port):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        said, _ = supervise("start(*FILES, str(port)).wait_until_healthy(lambda: True)", port, tmp_path).communicate(
            timeout=120
        )
    finally:
        other.kill()
        other.wait()
    assert f"port {port}: another process of yours listens there" in said


def test_a_port_that_another_user_takes_while_the_server_is_down_is_refused(tmp_path: Path) -> None:
    port = free_port()
    script = (
        "server = start(*FILES, str(port))\n"
        "server.wait_until_healthy(lambda: True)\n"
        "end(server)\n"
        "(folder / 'down').touch()\n"
        "while not (folder / 'taken').exists(): time.sleep(0.02)\n"
        "server._started_at = 0.0\n"
        "server.keep_alive()\n"
    )
    supervisor = supervise(script, port, tmp_path)
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "down").exists():
        assert time.monotonic() < deadline
        assert supervisor.poll() is None
        time.sleep(0.02)
    with as_second_user(LISTENER, str(port)):
        (tmp_path / "taken").touch()
        said, _ = supervisor.communicate(timeout=120)
    assert f"a process of user {NOBODY} listens there" in said


CHILD_KEEPS_PORT = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
if os.fork() == 0:
    if sys.argv[2] == "session":
        os.setsid()
    time.sleep(600)
while True:
    connection = server.accept()[0]
    connection.recv(4096)
    connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n")
    connection.close()
"""


@pytest.mark.parametrize("where", ["child", "session"])
def test_what_a_dead_server_leaves_does_not_keep_its_port(tmp_path: Path, where: str) -> None:
    script = (
        f"server = start(sys.executable, '-c', CHILD_KEEPS_PORT, str(port), {where!r})\n"
        "server.wait_until_healthy(lambda: True)\n"
        "restart(server)\n"
        "assert server.wait_until_healthy(lambda: True)\n"
        "end(server)\n"
        "for pid in server._left(): os.kill(pid, signal.SIGKILL)\n"
        "print('it answers again')\n"
    )
    said, _ = supervise(script, free_port(), tmp_path).communicate(timeout=120)
    assert "it answers again" in said, said


def test_the_workers_of_a_server_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    port = free_port()
    script = (
        "server = start(sys.executable, '-c', CHILD_KEEPS_PORT, str(port), 'child')\n"
        "server.wait_until_healthy(lambda: True)\n"
        "print('healthy', flush=True)\n"
        "time.sleep(600)\n"
    )
    with supervise(script, port, tmp_path) as supervisor:
        assert supervisor.stdout is not None
        assert any(line == "healthy\n" for line in supervisor.stdout)
        supervisor.kill()
    deadline = time.monotonic() + 60.0
    while listeners(port):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_health_of_a_server_is_asked_without_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    port = free_port()
    server = RewardServer(asked([*FILES, str(port)], port), 30.0, tmp_path / "log", tmp_path)
    assert server.wait_until_healthy(lambda: True)
    end(server)


def test_a_server_that_is_killed_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    server = RewardServer(asked(command, port), 30.0, tmp_path / "log", tmp_path)
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
