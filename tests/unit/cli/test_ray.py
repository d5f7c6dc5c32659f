"""`hpc-grpo cluster ray` as a user calls it; what it would become is kept instead."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pytest

from hpc_grpo.run.lock import LockOwner
from tests.support.command import call
from tests.support.run_builder import RunBuilder

ADDRESS, DASHBOARD = "10.0.0.1:6000", "127.0.0.1:8265"


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands, with their environments, that the process became."""
    found: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _path, argv, environ: found.append((argv, environ)))
    return found


def _trains(built: RunBuilder, dashboard: str, *, here: bool) -> None:
    built.attempt(1, ray_address=ADDRESS, ray_dashboard=dashboard)
    owner = LockOwner.here("11", 1)
    built.run.holder.write_text(json.dumps(asdict(owner) if here else {**asdict(owner), "host": "n1"}))


@pytest.mark.parametrize("words", [("dashboard",), ("list", "actors"), ("job", "submit", "--", "id")])
def test_a_run_without_a_dashboard_says_how_to_have_one(
    words: tuple[str, ...], built: RunBuilder, became: list[object]
) -> None:
    _trains(built, "", here=True)
    result = call("cluster", "ray", str(built.run.path), *words)
    assert result.exit_code == 78
    assert "launch.ray_dashboard=true" in result.output
    assert became == []


def test_the_dashboard_is_told_with_the_file_of_its_token_and_the_way_to_it(built: RunBuilder) -> None:
    _trains(built, DASHBOARD, here=False)
    printed = call("cluster", "ray", str(built.run.path), "dashboard").output
    assert f"http://{DASHBOARD} on n1; the dashboard asks for the token in {built.run.secret}" in printed
    assert f"ssh -L 8265:{DASHBOARD} n1" in printed


def test_what_the_dashboard_answers_is_asked_on_the_head_with_the_token(
    built: RunBuilder, became: list[tuple[list[str], dict[str, str]]]
) -> None:
    _trains(built, DASHBOARD, here=True)
    words = ["job", "submit", "--", "python", "-c", "print(1)"]
    call("cluster", "ray", str(built.run.path), *words)
    ((argv, environ),) = became
    assert argv[1:] == ["-m", "ray.scripts.scripts", *words]
    assert environ["RAY_API_SERVER_ADDRESS"] == f"http://{DASHBOARD}"
    assert (environ["RAY_ADDRESS"], environ["RAY_AUTH_TOKEN_PATH"]) == (ADDRESS, str(built.run.secret))


def test_elsewhere_nothing_on_that_port_is_given_the_token(built: RunBuilder, became: list[object]) -> None:
    _trains(built, DASHBOARD, here=False)
    result = call("cluster", "ray", str(built.run.path), "job", "list")
    assert result.exit_code == 78
    assert "on the loopback of n1" in result.output
    assert became == []


def test_what_asks_ray_itself_needs_no_dashboard(
    built: RunBuilder, became: list[tuple[list[str], dict[str, str]]]
) -> None:
    _trains(built, "", here=False)
    call("cluster", "ray", str(built.run.path), "memory")
    ((argv, environ),) = became
    assert argv[-1] == "memory"
    assert "RAY_API_SERVER_ADDRESS" not in environ
