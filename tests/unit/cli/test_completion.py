"""What bash and zsh offer at TAB: commands, runs, configs and keys, without a space after what goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from hpc_grpo.errors import EXIT_CONFIG
from tests.support.command import call, command_of
from tests.support.run_builder import RunBuilder

BASH = """compopt() { echo "$@"; }; . "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_hpc_grpo_complete hpc-grpo; printf '%s\\n' "${COMPREPLY[@]}" """
ZSH = """compdef() { :; }; compadd() { print -l -- "$@"; print -l -- ${(P)@[-1]}; }
_path_files() { print files; }; . $1; shift; words=("$@"); CURRENT=$#; _hpc_grpo_complete"""


@pytest.fixture(params=["bash", "zsh"])
def shell(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param}: none is here")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for variable in ("ZDOTDIR", "HPC_GRPO_RUNS_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    RunBuilder(tmp_path / "runs" / "my-run")
    (tmp_path / "own.yaml").touch()
    assert call("--install-completion", request.param).exit_code == 0
    return str(request.param)


def offered(shell: str, *words: str) -> list[str]:
    script = Path.home() / ".local" / "share" / "hpc-grpo" / f"completion.{shell}"
    program = [shell, "-f", "-c", ZSH, "zsh"] if shell == "zsh" else [shell, "--norc", "-c", BASH, "bash"]
    done = subprocess.run([*program, script, "hpc-grpo", *words], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "names", "goes_on"),
    [
        (["wat"], ["watch"], False),
        (["model", "s"], ["sample", "serve"], False),
        (["watch", "my"], ["my-run"], False),
        (["train", "ow"], ["own.yaml"], False),
        (["train", "local/ti"], ["local/tiny_grpo", "local/tiny_sft"], False),
        (["train", "own.yaml", "tra"], ["train."], True),
        (["train", "own.yaml", "train.l"], ["train.lr="], True),
        (["config", "own.yaml", "task.args.critic_l"], ["task.args.critic_lr="], True),
        (["config", "own.yaml", "train.lr="], [], False),
        (["train", "own.yaml", "train.lr", "=", ""], [], False),
    ],
)
def test_tab_offers(shell: str, words: list[str], names: list[str], goes_on: bool) -> None:
    found = offered(shell, *words)
    assert [name for name in found if name in names] == names
    assert any(name in found for name in ("nospace", "open")) == goes_on
    assert {*found} <= {*names, "-o", "nospace", "-U", "-V", "hpc-grpo", "-S", "-a", "open", "ended"}


@pytest.mark.parametrize("words", ["status", "report", "cluster shell"])
def test_a_command_that_takes_a_run_offers_its_name(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HPC_GRPO_RUNS_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    RunBuilder(tmp_path / "runs" / "my-run")
    command = command_of(words)
    assert [item.value for item in command.params[0].shell_complete(click.Context(command), "my")] == ["my-run"]


def test_the_line_is_read_below_an_unfinished_line_and_from_a_home_with_a_space(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "ho me"
    home.mkdir()
    rc = home / f".{shell}rc"
    rc.write_bytes(b"# caf\xe9\nexport MINE=1")  # no final newline, and no UTF-8
    monkeypatch.setenv("HOME", str(home))
    assert call("--install-completion", shell).output.endswith(
        f"type: . '{home}/.local/share/hpc-grpo/completion.{shell}'\n"
    )
    (home / ".local" / "share" / "hpc-grpo" / f"completion.{shell}").write_text("echo $MINE read")
    done = subprocess.run([shell, "-f", "-c", '. "$0"', str(rc)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("1 read\n", "")


@pytest.mark.parametrize("blocked", [".local", ".bashrc"])
def test_a_home_that_cannot_be_written_is_an_error_with_a_fix(
    blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / blocked).symlink_to("/dev/full/x")
    result = call("--install-completion", "bash")
    assert (result.exit_code, "cannot be written (" in result.stderr) == (EXIT_CONFIG, True), result.output
    assert "set HOME to another folder" in result.stderr


def test_a_second_installation_adds_no_second_line(shell: str) -> None:
    rc = Path.home() / f".{shell}rc"
    before = rc.read_text()
    assert call("--install-completion", shell).exit_code == 0
    assert rc.read_text() == before and before.count("completion") == 2
