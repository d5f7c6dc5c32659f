"""Commands that act on a run refuse one that another user may write: its config, records and copy are code to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.cli import COMMANDS
from hpc_grpo.cli.evaluate import find_subject
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run.owner import SHARED_VARIABLE
from hpc_grpo.run.paths import RunDir
from tests.support.command import call, command_of
from tests.support.configs import minimal_config
from tests.support.second_user import give_to_second_user

LOOK = {"status", "watch", "logs", "report", "disk du"}
"""Commands that show records. They run nothing that a run's files name."""

ACT = {
    "stop": (), "submit": (), "cluster shell": (), "cluster ray": ("status",), "model replay": ("--step", "1"),
    "model export": (), "disk clean": (), "plan": (), "config": (), "compare": ("theirs",), "model eval": (),
    "model sample": ("hello",), "model serve": (), "fork": ("--step", "1"), "train": (), "job-setup": (),
}  # fmt: skip


def commands_with_a_run() -> set[str]:
    """Return the commands whose usage names a RUN."""
    usages = {name: [str(each.metavar) for each in command_of(name).params] for name in COMMANDS}
    return {name for name, words in usages.items() if any("RUN" in word for word in words)} - {"attempt"}


@pytest.fixture(params=["writable", "foreign"])
def planted(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.delenv(SHARED_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    witness = tmp_path / "witness"
    (tmp_path / "theirs.py").write_text(f"open({str(witness)!r}, 'w')\ndef score(prompts, completions): return [0.0]\n")
    command = ["sh", "-c", f"echo > {witness}"]
    server = {"command": command, "health_url": "http://127.0.0.1:9/health"}
    config = minimal_config(
        run={"name": "theirs", "root": str(tmp_path)},
        rewards=[{"name": f"{tmp_path / 'theirs.py'}:score"}],
        launch={"reward_server": server},
    )
    run = RunDir(tmp_path / "theirs")
    (tmp_path / "d.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
    freeze(config, [], [])
    (run.export(1)).mkdir(parents=True)
    if request.param == "foreign":
        give_to_second_user(run.path)
        run.path.chmod(0o755)
    else:
        run.path.chmod(0o777)
    witness.unlink(missing_ok=True)
    return run


def test_every_command_with_a_run_is_known_to_look_or_to_act() -> None:
    assert commands_with_a_run() == LOOK | set(ACT)


@pytest.mark.parametrize("name", ACT)
def test_a_command_that_acts_refuses_a_run_of_others(planted: RunDir, name: str) -> None:
    before = sorted(planted.path.rglob("*"))
    done = call(*name.split(), str(planted.path), *ACT[name])
    assert done.exit_code == 78, done.output
    assert "you" in done.stderr, done.stderr
    assert any(words in done.stderr for words in ("may be written by others", "belongs to user"))
    assert sorted(planted.path.rglob("*")) == before
    assert not (planted.path.parent / "witness").exists()


@pytest.mark.parametrize("name", ["stop", "disk clean", "model export"])
def test_a_command_that_writes_refuses_a_run_on_a_read_only_disk(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    allows = os.access

    def read_only(path: Path, mode: int, **options: Any) -> bool:
        return mode != os.W_OK and allows(path, mode, **options)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hpc_grpo.cli.replay.learner_environment", lambda *_, **__: {})
    run = freeze(minimal_config(run={"name": "mine", "root": str(tmp_path)}), [], [])
    monkeypatch.setattr(os, "access", read_only)
    done = call(*name.split(), str(run.path))
    assert (done.exit_code, f"{run.path} cannot be written, and this command writes there." in done.stderr) == (
        78,
        True,
    )
    assert not run.stop_marker.exists()


def test_a_second_run_of_an_eval_is_refused_too(planted: RunDir, tmp_path: Path) -> None:
    own = tmp_path / "model"
    own.mkdir()
    (own / "config.json").write_text("{}")
    (tmp_path / "d.jsonl").write_text("{}\n")
    done = call("model", "eval", str(own), str(planted.path), "--data", str(tmp_path / "d.jsonl"))
    assert (done.exit_code, "code as you" in done.stderr) == (78, True), done.output


def test_who_trusts_the_others_says_so(planted: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        find_subject(str(planted.path), {"settings_of": None, "steps": (1,), "base": False}, ())
    monkeypatch.setenv(SHARED_VARIABLE, "1")
    assert find_subject(str(planted.path), {"settings_of": None, "steps": (1,), "base": False}, ()).first_model == str(
        planted.export(1)
    )


@pytest.mark.parametrize("name", ["status", "status --why", "disk du"])
def test_a_command_that_looks_shows_it(planted: RunDir, name: str) -> None:
    done = call(*name.split(), str(planted.path))
    assert done.exit_code == 0, done.output
    assert not (planted.path.parent / "witness").exists()
