"""A VM that lies, a job that brings a secret, a folder that others may write: what each of them gets."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from hpc_grpo.errors import ConfigError
from hpc_grpo.fleet.controller import Controller
from hpc_grpo.fleet.db import Database, jobs, vms
from hpc_grpo.fleet.jobs import find_job
from hpc_grpo.fleet.machine import Decide, converse
from hpc_grpo.fleet.messages import Outcome, Request
from hpc_grpo.fleet.poll import Poller
from hpc_grpo.fleet.settings import Fleet, FleetSettings, open_fleet
from hpc_grpo.run.owner import SHARED_VARIABLE
from tests.support.command import call
from tests.support.second_user import give_to_second_user
from tests.support.simulated_vms import add_vms


class HostileVm:
    """Answers each visit by the same line, whatever it is asked."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._lines = [json.dumps(answer).encode() + b"\n"]
        self.outcome: dict[str, Any] = {"started": [], "revoked": [], "failed": [], "problem": ""}
        self.num_visits = 0

    async def readline(self) -> bytes:
        return self._lines.pop(0) if self._lines else json.dumps(self.outcome).encode() + b"\n"

    async def read(self) -> bytes:
        return b""

    def write(self, data: bytes) -> None:
        """Take no notice."""

    async def visit(self, request: Request, decide: Decide) -> Outcome:
        self.num_visits += 1
        return await converse(self, self, self, request, decide)

    async def close(self) -> None:
        """Nothing is open."""


def seen(key: list[Any], **values: Any) -> dict[str, Any]:
    log = base64.b64encode(b"written by a VM\n").decode()
    attempt = {"key": key, "gpus": [], "ended": None, "log_size": 16, "log": log, **values}
    return {"gpus": [], "attempts": [attempt], "problem": ""}


def visit(db: Database, folder: Path, answer: dict[str, Any]) -> None:
    add_vms(db, 1)
    fleet = Fleet(folder, FleetSettings(), f"sqlite:///{folder / 'fleet.db'}", "")
    asyncio.run(Poller(Controller(fleet, lambda row: HostileVm(answer))).round())


@pytest.mark.parametrize(
    "key",
    [
        ["job", "../../../evil"],
        ["job", "{elsewhere}/evil"],
        ["../../evil", 1],
        ["job", 1],
        [["job"], 1],
        "ab",
    ],
    ids=str,
)
def test_a_hostile_vm_writes_no_log_that_is_not_its_own(db: Database, tmp_path: Path, key: list[Any]) -> None:
    folder = tmp_path / "deep" / "fleet"
    folder.mkdir(parents=True)
    (folder / "fleet.db").symlink_to(tmp_path / "fleet.db")
    visit(db, folder, seen([part.format(elsewhere=tmp_path) if isinstance(part, str) else part for part in key]))
    assert list(tmp_path.rglob("*.log")) == []


@pytest.mark.parametrize(
    "answer",
    [
        seen(["job", 1], ended={"kind": "won", "code": 0, "why": "", "step": 1}),
        seen(["job", 1], ended=["exit"]),
        seen(["job", float("inf")]),
        seen(["job", 1], gpus=["0; DROP TABLE jobs"]),
        seen(["job", 1], ended={"kind": "exit", "code": 1 << 40, "why": "", "step": 1}),
        {"gpus": [{"index": 1 << 40, "uuid": "", "memory_mib": 1, "used_mib": 1, "num_processes": 0}], "attempts": [],
         "problem": ""},
        {"gpus": [{"index": "x", "uuid": "", "memory_mib": 1, "used_mib": 1, "num_processes": 0}], "attempts": [],
         "problem": ""},
        {"gpus": 3, "attempts": 4, "problem": 5},
        {"attempts": {}},
        {},
    ],
)  # fmt: skip
def test_nonsense_of_a_vm_is_a_visit_that_failed(db: Database, tmp_path: Path, answer: dict[str, Any]) -> None:
    from hpc_grpo.fleet.jobs import list_vms

    visit(db, tmp_path, answer)
    (vm,) = list_vms(db)
    assert "gave an invalid answer" in vm["error"]


def test_a_gpu_that_a_vm_names_twice_is_one(db: Database, tmp_path: Path) -> None:
    from hpc_grpo.fleet.jobs import list_vms

    gpu = {"index": 0, "uuid": "\x00\ud800", "memory_mib": 1, "used_mib": 1, "num_processes": 0}
    visit(db, tmp_path, {"gpus": [gpu, gpu], "attempts": [], "problem": ""})
    (vm,) = list_vms(db)
    assert (vm["state"], vm["available_gpus"]) == ("ready", 1)


def test_a_vm_has_no_say_about_the_attempts_of_others(db: Database, tmp_path: Path) -> None:
    """It says that an attempt of another VM was revoked, which would start that job a second time."""
    first, second = add_vms(db, 2)
    row = {"job_id": "job", "status": "running", "attempt": 1, "num_gpus": 1, "changed_at": 1e12}
    with db.write() as connection:
        connection.execute(sa.insert(jobs).values(**row, vm_id=second))
        connection.execute(sa.update(vms).where(vms.c.vm_id == second).values(poll_at=1e12))
    vm = HostileVm({"gpus": [], "attempts": [], "problem": ""})
    vm.outcome |= {"revoked": [["job", 1]], "started": [["job", 1]], "failed": [[["job", 1], "it is mine"]]}
    fleet = Fleet(tmp_path, FleetSettings(), f"sqlite:///{tmp_path / 'fleet.db'}", "")
    asyncio.run(Poller(Controller(fleet, lambda row: vm)).round())
    assert vm.num_visits == 1
    found = find_job(db, "job")
    assert (found["status"], found["attempt"], found["vm_id"], first != second) == ("running", 1, second, True)


@pytest.fixture
def fleet_folder(tmp_path: Path) -> Path:
    assert call("place", "fleet", "--fleet", str(tmp_path / "fleet"), "init").exit_code == 0
    return tmp_path / "fleet"


CONFIG = """
model: {path: m}
data: {train: {path: d.jsonl}}
train: {total_steps: 1}
rewards: [{name: remote, args: {url: "http://judge:1"%s}}]
"""


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (", password: hunter2", ()),
        (", headers: {Authorization: Bearer hunter2}", ()),
        ("", ("launch.env.HF_TOKEN=hunter2",)),
        ("", ('launch.notify=["send", "--token", "hunter2"]',)),
        ("", ("rewards.0.args.url=http://judge:1/?api_key=hunter2",)),
    ],
)
def test_a_job_with_a_secret_is_refused_and_not_stored(
    fleet_folder: Path, tmp_path: Path, written: str, words: tuple[str, ...]
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG % written)
    done = call("place", "fleet", "--fleet", str(fleet_folder), "submit", str(config), *words)
    assert (done.exit_code, "must not hold secrets" in done.stderr) == (78, True), done.output
    assert "hunter2" not in done.output
    assert not any(b"hunter2" in path.read_bytes() for path in fleet_folder.iterdir() if path.is_file())


def test_a_job_without_a_secret_is_stored(fleet_folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.yaml"
    config.write_text(CONFIG % ", api_key_env: JUDGE_KEY")
    assert call("place", "fleet", "--fleet", str(fleet_folder), "submit", str(config)).exit_code == 0


def test_the_database_is_its_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    folder.mkdir(mode=0o755)
    before = os.umask(0)
    try:
        assert call("place", "fleet", "--fleet", str(folder), "init").exit_code == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / "fleet.db").stat().st_mode) == 0o600


def test_a_database_of_before_is_closed(fleet_folder: Path) -> None:
    (fleet_folder / "fleet.db").chmod(0o644)
    assert call("place", "fleet", "--fleet", str(fleet_folder), "jobs").exit_code == 0
    assert stat.S_IMODE((fleet_folder / "fleet.db").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("inside", "make"),
    [
        ("", lambda path: path.chmod(0o777)),
        ("fleet.yaml", lambda path: path.chmod(0o666)),
        ("", give_to_second_user),
        ("fleet.db", give_to_second_user),
        ("fleet.yaml", give_to_second_user),
    ],
)
def test_a_fleet_that_others_may_write_is_refused(
    fleet_folder: Path, inside: str, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SHARED_VARIABLE, raising=False)
    fleet_folder.chmod(0o755)
    make(fleet_folder / inside)
    done = call("place", "fleet", "--fleet", str(fleet_folder), "jobs")
    assert (done.exit_code, "code on every VM" in done.stderr) == (78, True), done.output


def test_a_database_elsewhere_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "jobs.db"
    file.touch()
    give_to_second_user(file)
    with pytest.raises(ConfigError, match="belongs to user"):
        Database(f"sqlite:///{file}")


def test_who_trusts_the_others_of_a_fleet_says_so(fleet_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet_folder.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by others"):
        open_fleet(fleet_folder)
    monkeypatch.setenv(SHARED_VARIABLE, "1")
    assert open_fleet(fleet_folder).folder == fleet_folder
