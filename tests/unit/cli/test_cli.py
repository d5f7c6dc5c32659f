from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpc_grpo import __version__
from hpc_grpo.cli import COMMANDS
from hpc_grpo.config import load_config
from hpc_grpo.errors import EXIT_CONFIG
from tests.support.command import call, command_of


def test_help_lists_the_commands_of_a_user() -> None:
    printed = call("--help").output
    assert all(command in printed for command in ("train", "submit", "config"))
    assert not [line for line in printed.splitlines() if line.startswith(("  attempt", "  job-setup"))]
    assert call("--version").output == f"hpc-grpo, version {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there_and_hidden_where_it_has_no_summary(name: str) -> None:
    command = command_of(name)
    assert (command.name, command.hidden) == (name, not COMMANDS[name][1])


def test_help_answers_at_once() -> None:
    before = os.times().children_user
    subprocess.run([sys.executable, "-m", "hpc_grpo.cli", "--help"], check=True, capture_output=True)
    assert os.times().children_user - before < 0.4  # CPU seconds: independent of the machine's load


def test_config_prints_yaml_that_loads_to_the_same() -> None:
    printed = call("config", "local/debug", "--yaml", "--set", "train.lr=1e-3", "run.name=x")
    assert printed.exit_code == 0
    assert yaml.safe_load(printed.output) == load_config("local/debug", ["train.lr=1e-3", "run.name=x"]).model_dump(
        mode="json"
    )


def test_config_explains_every_key() -> None:
    lines = call("config", "local/debug").output.splitlines()
    (dtype,) = [line for line in lines if line.startswith("model.dtype = ")]
    assert dtype.startswith("model.dtype = float32 ")
    assert "Precision of the learners' forward pass" in dtype
    assert dtype.endswith("[default: bfloat16]")
    keys = [line.split(" = ")[0] for line in lines if line and not line.startswith("#")]
    assert {"rewards.0.name", "launch.num_nodes", "train.lr", "launch.env"} <= set(keys)
    assert all("  # " in line for line in lines if " = " in line)


def test_an_error_is_one_message_with_its_exit_code() -> None:
    result = call("config", "local/debug", "train.lrr=1")
    assert result.exit_code == 78
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert "did you mean 'lr'?" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["train", "submit"])
def test_an_unwritable_root_ends_with_78(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    without_data = ["data.train.path=org/rows", "eval.every=null"]
    result = call(command, "local/debug", *without_data, f"run.root={tmp_path}/file")
    assert result.exit_code == 78
    assert "cannot be written" in result.stderr


def test_a_dry_run_prints_the_script_and_makes_nothing(tmp_path: Path) -> None:
    words = ["data.train.path=org/rows", "eval.every=null", f"run.root={tmp_path}", "--nodes", "3"]
    result = call("submit", "local/debug", *words, "--account", "0042", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "#SBATCH --nodes=3\n" in result.output
    assert "#SBATCH --account=0042\n" in result.output
    commands = [line for line in result.output.splitlines() if line and not line.startswith("#")]
    assert commands[-1].endswith(f"{tmp_path}/debug/source attempt {tmp_path}/debug")
    assert list(tmp_path.iterdir()) == []


def test_setup_lines_of_the_command_come_after_those_of_the_site(tmp_path: Path) -> None:
    site = "launch.setup_lines=[module load cuda]"
    options = ["--setup", "export A='x y'", "--setup", "ulimit -n 9", "--dry-run"]
    script = call("submit", "local/debug", f"run.root={tmp_path}", site, *options).output
    assert ".began' || true\nmodule load cuda\nexport A='x y'\nulimit -n 9\n" in script


def test_a_chain_of_so_many_jobs_and_of_as_many_as_it_takes_is_a_usage_error(tmp_path: Path) -> None:
    result = call("submit", "local/debug", f"run.root={tmp_path}", "--chain", "2", "--until-complete", "--dry-run")
    assert (result.exit_code, "--chain N and --until-complete" in result.stderr) == (EXIT_CONFIG, True)
    assert list(tmp_path.iterdir()) == []


def test_a_complete_run_is_not_started_again(tmp_path: Path) -> None:
    from hpc_grpo.launch.freeze import freeze

    frozen = freeze(load_config("local/debug", [f"run.root={tmp_path}"]), [], [])
    frozen.run.complete_marker.touch()
    result = call("train", "local/debug", f"run.root={tmp_path}")
    assert result.exit_code == 0
    assert "already complete" in result.output
