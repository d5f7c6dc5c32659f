"""The dashboard answers its user alone, and reads no more than what is new."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.cli.options import runs_below
from hpc_grpo.errors import ConfigError
from hpc_grpo.report.dashboard import Dashboard
from tests.support.command import call
from tests.support.run_pages import finished_run, write_steps


@contextmanager
def served(root: Path, port: int | None = 0) -> Iterator[Dashboard]:
    server = Dashboard(lambda: runs_below(root), port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(server: Dashboard, path: str, **headers: str) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("GET", path, headers={"Authorization": f"Bearer {server.token}", **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def read(server: Dashboard, path: str) -> Any:
    status, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {"Authorization": ""}, 200),
        ("/", {"Host": "evil.example:8000"}, 403),
        ("/api/runs", {"Host": "localhost:9000"}, 200),
        ("/api/runs", {"Host": "rebound.example"}, 403),
        ("/api/runs", {"Authorization": ""}, 403),
        ("/api/runs", {"Authorization": "Bearer x\xff"}, 403),
        ("/api/run?run=../adder", {}, 404),
        ("/api/rollouts?run=adder&step=../../config", {}, 404),
        ("/api/other", {}, 404),
    ],
)
def test_who_does_not_show_the_token_or_comes_under_a_foreign_name_is_refused(
    tmp_path: Path, path: str, headers: dict[str, str], status: int
) -> None:
    finished_run(tmp_path / "adder")
    with served(tmp_path) as server:
        found, body = ask(server, path, **headers)
    assert found == status
    assert path != "/" or server.token.encode() not in body
    assert status == 200 or b"adder" not in body


def test_a_run_is_told_anew_once_its_files_change(tmp_path: Path) -> None:
    built = finished_run(tmp_path / "adder")
    with served(tmp_path) as server:
        (before,) = read(server, "/api/runs")
        assert read(server, "/api/runs")[0]["version"] == before["version"]
        run = read(server, "/api/run?run=adder")
        write_steps(built.run, range(21, 23), attempt=2)
        assert read(server, "/api/runs")[0]["version"] != before["version"]
        longer = read(server, f"/api/run?run=adder&evals={run['eval_version']}")
        groups = read(server, "/api/rollouts?run=adder&step=12")
    assert (run["steps"][-1], longer["steps"][-1]) == (20, 22)
    assert (len(run["held_out"]), longer["held_out"]) == (1, None)
    assert [group["ordinal"] for group in groups] == [3, 4]


def test_a_users_port_is_the_same_each_time_and_the_next_one_where_it_is_taken(tmp_path: Path) -> None:
    with served(tmp_path, None) as first, served(tmp_path, None) as second:
        assert 8000 <= first.server_port < second.server_port < 8000 + 1900 + 20
        assert first.token != second.token
        with pytest.raises(ConfigError, match="name one with --port"):
            Dashboard(list, first.server_port)


def test_the_command_says_how_to_reach_it_through_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(server: Dashboard) -> None:
        server.server_close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Dashboard, "serve_forever", interrupted)
    environ = {"SSH_CONNECTION": "10.0.0.9 52044 10.0.0.1 2222", "USER": "ada"}
    shown = call("dashboard", "--root", str(tmp_path), **environ).output
    port = shown.partition("127.0.0.1:")[2].partition(" ")[0]
    assert f"ssh -N -L {port}:127.0.0.1:{port} -p 2222 ada@10.0.0.1\n" in shown
    assert f"http://127.0.0.1:{port}/#token=" in shown
    assert os.getuid() % 1900 + 8000 <= int(port) < os.getuid() % 1900 + 8020
