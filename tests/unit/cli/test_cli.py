from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpc_grpo import __version__
from hpc_grpo.cli import COMMANDS, MOVED, MOVED_OPTIONS, SECTIONS, up_to_date
from hpc_grpo.config import load_config
from hpc_grpo.errors import EXIT_CONFIG
from tests.support.command import call, command_of


def test_the_version_is_that_of_the_package() -> None:
    assert call("--version").output == f"hpc-grpo, version {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_is_there_and_hidden_where_it_has_no_summary(name: str) -> None:
    command = command_of(name)
    assert (command.name, command.hidden) == (name.split()[-1], not COMMANDS[name][1])


def test_help_has_at_most_18_commands_in_groups_with_a_line_each_that_is_not_cut() -> None:
    printed = call("--help").output
    lines = dict(re.findall(r"^  (\w+) +(.*)$", printed.partition("Run:")[2].rpartition("\n\n")[0], re.M))
    shown = [name for names in SECTIONS.values() for name in names]
    assert lines == {name: COMMANDS[name][1] for name in shown}
    assert len(shown) <= 18
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    "words",
    [None, *(name for name, (target, _) in COMMANDS.items() if not target), "reward", "place host", "place fleet"],
)
def test_no_help_of_a_group_cuts_a_line(words: str | None) -> None:
    assert "..." not in call(*(words or "").split(), "--help").output.replace("[ARGS]...", "")


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_says_the_new_one_and_answers(old: str) -> None:
    result = call(old, "--help")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"hpc-grpo {old} is now {MOVED[old]}. ")
    assert result.stdout.startswith(f"Usage: main {MOVED[old].partition(' --')[0]} ")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["model", "eval"], {"--num", "--out", "--root"}),
        (["model", "sample"], {"--num", "--root"}),
        (["logs"], {"--num"}),
        (["demo"], {"--root"}),
        (["fleet", "logs"], {"--num"}),
        (["place", "fleet", "logs"], {"--num"}),
    ],
)
def test_an_old_option_is_read_as_the_new_one(words: list[str], options: set[str]) -> None:
    old = [f"{name}=3" for name, new in MOVED_OPTIONS.items() if new in options]
    assert {word.partition("=")[0] for word in up_to_date([*words, *old]) if word.startswith("--")} == options


def test_an_old_option_is_not_told_where_it_stays(capsys: pytest.CaptureFixture[str]) -> None:
    assert up_to_date(["fleet", "jobs", "--lines=3"]) == ["place", "fleet", "jobs", "--lines=3"]
    assert "--lines" not in capsys.readouterr().err


def test_a_misspelt_command_has_its_neighbour_in_the_error() -> None:
    result = call("sumbit", "x.yaml")
    assert (result.exit_code, "did you mean 'submit'?" in result.stderr) == (EXIT_CONFIG, True)


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


def test_an_option_of_sbatch_may_have_its_dashes(tmp_path: Path) -> None:
    script = call("submit", "local/debug", f"run.root={tmp_path}", "--sbatch", "--qos=long", "--dry-run").output
    assert "#SBATCH --qos=long\n" in script


def test_setup_lines_of_the_command_come_after_those_of_the_site(tmp_path: Path) -> None:
    site = "launch.setup_lines=[module load cuda]"
    options = ["--setup", "export A='x y'", "--setup", "ulimit -n 9", "--dry-run"]
    script = call("submit", "local/debug", f"run.root={tmp_path}", site, *options).output
    assert ".began' || true\nmodule load cuda\nexport A='x y'\nulimit -n 9\n" in script


def test_a_job_by_hand_gets_its_setup_lines_by_the_words_of_train(tmp_path: Path) -> None:
    from hpc_grpo.launch.freeze import freeze

    words = [f"run.root={tmp_path}", "launch.setup_lines=[ulimit -n 9]"]
    run = freeze(load_config("local/debug", words), [], [])
    for given in (["local/debug", *words], [str(run.path)], [str(run.path), "--accept-changes"]):
        assert call("job-setup", *given).output == "ulimit -n 9\n"


@pytest.mark.parametrize("other", ["--one-job", "--until-complete"])
def test_two_answers_to_how_many_follow_on_jobs_are_a_usage_error(tmp_path: Path, other: str) -> None:
    result = call("submit", "local/debug", f"run.root={tmp_path}", "--chain", "2", other, "--dry-run")
    assert (result.exit_code, "contradict each other" in result.stderr) == (EXIT_CONFIG, True)
    assert list(tmp_path.iterdir()) == []


def test_a_complete_run_is_not_started_again(tmp_path: Path) -> None:
    from hpc_grpo.launch.freeze import freeze

    run = freeze(load_config("local/debug", [f"run.root={tmp_path}"]), [], [])
    run.complete_marker.touch()
    for words in (["local/debug", f"run.root={tmp_path}"], [str(run.path)]):
        result = call("train", *words)
        assert result.exit_code == 0
        assert "already complete" in result.output
    run.complete_marker.touch()
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')
    result = call("train", str(run.path), "train.lr=1e-3")
    assert (result.exit_code, "hpc-grpo fork" in result.stderr) == (EXIT_CONFIG, True)


TRL_LACKS = ("--set", "rewards=[{name: math}]", "--set", "data.train.path=rows.jsonl")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "my.yml"], "did you mean 'my.yaml'?"),
        (["train", "rows.jsonl"], "is no config: name it in data.train.path"),
        (["train", "broken.yaml"], "broken.yaml, line 2, column 1 is not valid YAML: expected ',' or '}'"),
        (["config", "my.yaml", "train.lr", "=", "1e-6"], "without spaces, such as train.lr=1e-6"),
        (["train", "my.yaml", "--train.lr", "1e-6"], "CONFIG and keys have no dashes: CONFIG train.lr=VALUE."),
        (
            ["train", "my.yaml", "--lr", "1e-6"],
            "No such option '--lr'. CONFIG and keys have no dashes: CONFIG train.lr=VALUE.",
        ),
        (["config", "my.yaml", "--train.lr=1e-6"], "CONFIG and keys have no dashes: CONFIG train.lr=VALUE."),
        (["train", "my.yaml", "train.lr = 1e-6"], "without spaces, such as train.lr=1e-6"),
        (["train", "my.yaml", "'train.lr=1e-6'"], "without quotes or signs before the key"),
        (["train", "my.yaml", "+train.lr=1e-6"], "without quotes or signs before the key"),
        (["train", "my.yaml", "--train.lr=1e-6"], "CONFIG train.lr=VALUE. `hpc-grpo init` writes a CONFIG."),
        (["config", "folder.yaml"], "No config 'folder.yaml': this is a folder. Give a file. Shipped"),
        (["config", "engine.vllm.foo=1"], "No config 'engine.vllm.foo=1': KEY=VALUE comes after a CONFIG. Shipped"),
        (["config", "local/debug", "nope=1"], "nope: unknown key. Valid here: "),
        (["config", "indent.yaml"], "Indent all keys of a section by the same number of spaces."),
        (["config", "deep.yaml"], "Indent all keys of a section by the same number of spaces."),
        (["config", "quote.yaml"], "write ' inside of '…' twice."),
        (["config", "colon.yaml"], "A key needs one colon and a space."),
        (["config", "space.yaml"], "'rollout.group_size:4': unknown key. Write a space after the colon: group_size: 4"),
        (["config", "local/debug", "train.lr=inf"], "train.lr = 'inf': must be a finite number"),
        (["config", "local/debug", "run.name=2026-30-11"], "not valid YAML: month must be in 1..12\nPut a text in quo"),
        (["config", "local/debug", "run.name=!!int x"], "Put a text in quotes."),
        (["config", "local/debug", "run.name=" + "[" * 2000], "Put a text in quotes."),
        (["config", "date.yaml"], "Config date.yaml is not valid YAML: month must be in 1..12. Put a text in quotes."),
        (["status", "~no_such_user/run"], "RUN = '~no_such_user/run' must be a run directory"),
        (["model", "eval", "~no_such_user/model"], "Nor is it a model"),
        (["config", "a" * 300], "aaa': the name is too long. Give a shorter one."),
        (["model", "eval", "a" * 300], "the name is too long. Give a shorter one."),
        (["plan", "local/debug", f"model.path={'a' * 300}"], "the name is too long. Give a shorter one."),
        (["config", "local/debug", "run.name="], "run.name = null: must be a text.\n"),
        (["submit", "my.yaml", "-p", "gpu"], "Options of sbatch: --sbatch KEY=VALUE.\n"),
        (["runs"], "No command 'runs'; did you mean 'status'?"),
        (["config", "--from-trl", "trl.yaml", *TRL_LACKS, "--out", "rows.jsonl/a.yaml"], "a.yaml cannot be written ("),
        (["reward", "score", "empty.yaml", "--reward", "math"], "empty.yaml is empty. It must hold one line or more"),
        (
            ["train", "--num_generations", "8"],
            "CONFIG train.lr=VALUE. num_generations is TRL's: here set rollout.group_s",
        ),
        (
            ["train", "--model", "org/m"],
            "No such option '--model'. CONFIG and keys have no dashes: CONFIG train.lr=VALUE. `",
        ),
        (["submit", "my.yaml", "--dryrun"], "No such option '--dryrun'; did you mean '--dry-run'?"),
        (["submit", "my.yaml", "--mem=64G"], "Options of sbatch: --sbatch mem=VALUE."),
        (["submit", "my.yaml", "--nodes", "two"], "'two' is not a valid integer."),
        (["report", "my.yaml"], "RUN = 'my.yaml' is a config, but this command needs its run"),
        (["evaluate", "runs/a"], "No command 'evaluate'; did you mean 'model eval'?"),
        (["sbatch", "my.yaml"], "No command 'sbatch'; did you mean 'submit'?"),
        (["help"], "No command 'help'; did you mean '--help'?"),
        ([""], "No command ''"),
        (["train"], "Missing argument 'CONFIG|RUN'. `hpc-grpo init` writes a CONFIG."),
        (["config", "tab.yaml"], "tab.yaml, line 2, column 1 is not valid YAML: found character '\\t'"),
        (["config", "twice.yaml"], "twice.yaml, line 2, column 1 is not valid YAML: the key 'train' occurs twice."),
        (["config", "empty.yaml"], "Config empty.yaml is empty; it must hold sections, such as run: {name: my-run}."),
        (["config", "list.yaml"], "Config list.yaml holds a list; it must hold sections"),
        (["submit", "nothing"], "Nor is it a run: RUN = 'nothing' must be a run directory"),
        (
            ["reward", "test", "math", "--response", "4"],
            "No such option '--response'. Options: --prompt, --completion, ",
        ),
        (["reward", "test", "no.py:f", "--prompt", "p", "--completion", "c"], "error: Reward '"),
    ],
)
def test_a_newcomers_mistake_has_the_fix_in_its_error(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {
        "my.yaml": "{}",
        "rows.jsonl": "{}",
        "broken.yaml": "run: {name: x\n",
        "tab.yaml": "run:\n\tname: x\n",
        "twice.yaml": "train: {lr: 1e-6}\ntrain: {total_steps: 5}\n",
        "empty.yaml": "",
        "date.yaml": "run: {name: 2026-30-11}\n",
        "deep.yaml": "run:\n  name: x\n   root: y\n",
        "quote.yaml": "run: {name: x}\ndata:\n  path: 'it's'\n",
        "indent.yaml": "run:\n  name: x\n root: y\n",
        "colon.yaml": "run: {name: x}\ntrain {lr: 1, total_steps: 5}\n",
        "space.yaml": "rollout: {group_size:4}\n",
        "list.yaml": "- run: {name: x}\n",
        "trl.yaml": "model_name_or_path: org/m\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder.yaml").mkdir()
    result = call(*words)
    assert (result.exit_code, said in result.stderr) == (EXIT_CONFIG, True), result.stderr
    assert result.stderr.count("Reward '") <= 1
    assert ("Nor is it a run" in result.stderr) == (words[-1] == "nothing")
