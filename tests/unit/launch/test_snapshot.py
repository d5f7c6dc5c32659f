"""What a run is made of is copied at its first start, and changes only where the user says so."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hpc_grpo.config import Config, load_config
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch import freeze as freeze_module
from hpc_grpo.launch.freeze import freeze, git_state
from hpc_grpo.run import frozen_config, source
from hpc_grpo.run.frozen_config import read_inputs
from hpc_grpo.run.paths import RunDir


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a small package that is copied in place of this one."""
    package = tmp_path / "installed" / "hpc_grpo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("VERSION = 1\n")
    monkeypatch.setattr(source, "PACKAGE", package)
    monkeypatch.setattr(freeze_module, "PACKAGE", package)
    return package


@pytest.fixture
def config(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def reward(prompts, completions): ...\n")
    return load_config(
        "local/debug", [f"run.root={tmp_path / 'runs'}", "rewards=[{name: mine.py:reward}]", "eval.every=null"]
    )


def begun(config: Config) -> RunDir:
    """Freeze a run, and leave a step of it."""
    run = freeze(config, ["submit"], [])
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')
    return run


def test_an_edited_function_is_refused_until_that_is_accepted(config: Config, tmp_path: Path) -> None:
    run = begun(config)
    (tmp_path / "mine.py").write_text("def reward(prompts, completions): return 1\n")
    with pytest.raises(ConfigError, match=r"Changed since the run started.*mine\.py"):
        freeze(config, ["submit"], [])
    freeze(config, ["submit", "--accept-changes"], [], accepts_changes=True)
    assert read_inputs(run).accepting == ("submit", "--accept-changes")
    assert json.loads(run.source.read_text())["resumed"][-1]["accepts_changes"]
    freeze(config, ["submit"], [])


def test_a_newer_package_adds_no_keys_to_the_config_that_the_copy_reads(config: Config) -> None:
    run = begun(config)
    older = yaml.safe_load(run.config.read_text())
    del older["checkpoint"]["behind_training"]  # as a package has it that came before this key
    frozen_config._write(run, older)
    freeze(config, ["resume"], [])
    assert "behind_training" not in run.config.read_text()
    freeze(config, ["resume", "--accept-changes"], [], accepts_changes=True)
    assert "behind_training" in run.config.read_text()


def test_an_edited_package_is_said_and_the_copy_kept(
    config: Config, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(config)
    (package / "__init__.py").write_text("VERSION = 2\n")
    freeze(config, ["submit"], [])
    assert "continues with its own copy of hpc-grpo; the installed one differs" in capsys.readouterr().err
    assert (run.source_dir / "hpc_grpo" / "__init__.py").read_text() == "VERSION = 1\n"
    freeze(config, ["submit"], [], accepts_changes=True)
    assert (run.source_dir / "hpc_grpo" / "__init__.py").read_text() == "VERSION = 2\n"


def test_a_run_from_before_there_were_copies_gets_none(config: Config) -> None:
    run = begun(config)
    written = json.loads(run.source.read_text())
    run.source.write_text(json.dumps({key: value for key, value in written.items() if key not in ("copy", "digest")}))
    run.source_dir.rename(run.path / "aside")
    freeze(config, ["submit"], [])
    assert not run.source_dir.exists()


def test_a_start_folder_that_is_gone_is_refused_until_another_is_accepted(config: Config, tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    run = begun(config)
    written = json.loads(run.source.read_text())
    del written["digest"]
    run.source.write_text(json.dumps({**written, "working_dir": str(tmp_path / "gone")}))
    with pytest.raises(ConfigError, match=r"in .*gone, which is gone.*, repeat the command with --accept-changes"):
        freeze(config, ["submit"], [])
    freeze(config, ["submit"], [], accepts_changes=True)
    assert json.loads(run.source.read_text())["working_dir"] == str(tmp_path)


def test_the_diff_of_the_checkout_is_kept_without_its_secrets(tmp_path: Path) -> None:
    git: Callable[..., None] = lambda *words: subprocess.run(  # noqa: E731
        ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", *words], check=True, capture_output=True
    )
    git("init")
    (tmp_path / "code.py").write_text("x = 1\n")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "code.py").write_text('x = 2\nHF = "hf_0123456789abcdefghijABCDEFGHIJ"\n')
    state, diff = git_state(tmp_path)
    assert state is not None
    assert state["dirty"] is True
    assert "+x = 2" in diff
    assert "hf_0123" not in diff


def test_a_git_that_is_slow_leaves_what_it_did_not_say_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncase $* in *rev-parse*) echo {tmp_path};; *) sleep 60;; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(freeze_module, "_GIT_DEADLINE_S", 1.0)
    assert git_state(tmp_path) == ({"commit": str(tmp_path), "dirty": None}, "")
