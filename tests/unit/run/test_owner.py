"""A run directory that others may write is refused; its owner's processes make no such file."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_grpo.config import to_yaml
from hpc_grpo.errors import ConfigError
from hpc_grpo.launch.freeze import freeze, reconfigured
from hpc_grpo.run.owner import SHARED_VARIABLE, make_private_dir, refuse_shared
from hpc_grpo.run.paths import RunDir
from tests.support.configs import minimal_config

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "r")
    run.create()
    run.config.write_text(to_yaml(minimal_config(run={"name": "r", "root": str(tmp_path / "runs")})))
    run.config.chmod(0o644)
    return run


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode) & 0o777


def test_a_run_directory_is_its_users_alone_below_a_folder_that_the_group_writes(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    project.chmod(0o2775)
    before = os.umask(0o002)
    try:
        RunDir(project / "runs" / "r").create()
    finally:
        os.umask(before)
    assert mode_of(project / "runs" / "r") == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_run_directory_that_others_may_read_is_taken_up(run: RunDir, mode: int) -> None:
    run.path.chmod(mode)
    run.create()
    assert mode_of(run.path) == mode


@pytest.mark.parametrize("mode", [0o770, 0o775, 0o757, 0o2775, 0o1777])
def test_a_run_directory_that_others_may_write_is_refused_with_the_chmod_that_mends_it(run: RunDir, mode: int) -> None:
    run.path.chmod(mode)
    with pytest.raises(ConfigError, match="may be written by others") as refused:
        run.create()
    fix = re.search(r"chmod -R go-w \S+(?=\.)", str(refused.value))
    assert fix is not None
    subprocess.run(fix[0].split(), check=True)
    run.create()


@pytest.mark.parametrize("inside", ["config.yaml", "checkpoints"])
def test_what_others_may_write_in_a_run_directory_is_refused_too(run: RunDir, inside: str) -> None:
    run.checkpoints.mkdir()
    run.path.chmod(0o750)
    (run.path / inside).chmod(0o777)
    with pytest.raises(ConfigError, match=f"{inside} may be written by others"):
        run.create()


def test_what_nobody_else_can_enter_may_hold_files_of_any_mode(run: RunDir) -> None:
    """A site's default ACL on a project folder makes them so, whatever the umask."""
    run.config.chmod(0o666)
    run.create()


@as_root
@pytest.mark.parametrize("inside", ["", "config.yaml"])
def test_another_users_run_directory_is_refused(run: RunDir, inside: str) -> None:
    os.chown(run.path / inside, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"{inside} belongs to user {NOBODY}, not to you"):
        run.create()


def test_a_user_who_trusts_the_others_may_say_so(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.path.chmod(0o775)
    monkeypatch.setenv(SHARED_VARIABLE, "1")
    run.create()
    refuse_shared(run.path)


def test_that_cannot_be_said_in_the_directory_itself(run: RunDir) -> None:
    run.path.chmod(0o777)
    run.config.write_text(run.config.read_text() + f"env: {{{SHARED_VARIABLE}: '1'}}\n")
    with pytest.raises(ConfigError, match="may be written by others"):
        reconfigured(run, [])


@pytest.mark.parametrize("command", ["attempt", "submit", "train"])
def test_no_command_takes_up_what_others_may_write(run: RunDir, tmp_path: Path, command: str) -> None:
    """What a stranger of the group planted: a config whose driver, rewards or setup lines would run as us."""
    run.path.chmod(0o777)
    said = tmp_path / "said.yaml"
    said.write_text(run.config.read_text())
    words = [str(said) if command == "train" else str(run.path)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    argv = [sys.executable, "-m", "hpc_grpo.cli", command, *words]
    done = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "may be written by others" in done.stderr) == (78, True), done.stderr
    assert "Traceback" not in done.stderr


def test_freezing_refuses_what_others_may_write(run: RunDir) -> None:
    run.path.chmod(0o777)
    with pytest.raises(ConfigError, match="may be written by others"):
        freeze(minimal_config(run={"name": "r", "root": str(run.path.parent)}), [], [])


@pytest.mark.parametrize(("shell", "kept"), [(0o002, 0o022), (0o000, 0o022), (0o077, 0o077), (0o022, 0o022)])
def test_commands_make_no_file_that_others_may_write(shell: int, kept: int) -> None:
    program = (
        f"import os; os.umask({shell}); from hpc_grpo.run.owner import keep_others_from_writing as keep\n"
        "keep(); print(os.umask(0))"
    )
    env = {name: value for name, value in os.environ.items() if name != SHARED_VARIABLE}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert int(done.stdout) == kept


def test_a_folder_for_secrets_is_entered_by_nobody_else(tmp_path: Path) -> None:
    secret = tmp_path / ".secret"
    make_private_dir(secret)
    make_private_dir(secret)
    assert mode_of(secret) == 0o700


@pytest.mark.parametrize("planted", ["open", "link", "file", pytest.param("foreign", marks=as_root)])
def test_a_folder_for_secrets_that_is_not_ones_own_is_refused(tmp_path: Path, planted: str) -> None:
    secret, elsewhere = tmp_path / ".secret", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if planted == "link":
        secret.symlink_to(elsewhere)
    elif planted == "file":
        secret.touch()
    else:
        secret.mkdir(mode=0o700)
        secret.chmod(0o755 if planted == "open" else 0o700)
        os.chown(secret, NOBODY if planted == "foreign" else os.getuid(), -1)
    with pytest.raises(ConfigError, match=r"must be a folder of yours that nobody else can enter.*rm -r"):
        make_private_dir(secret)
