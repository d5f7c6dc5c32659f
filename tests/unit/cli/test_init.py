"""`hpc-grpo init`, `config KEY`, `config --changed` and `plan` with a run: what they write and say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpc_grpo.cli import main
from hpc_grpo.config import load_config
from hpc_grpo.data.encoder import held_out_below, prompt_hashes
from hpc_grpo.driver.schedule import train_length
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.preflight.inputs import refuse_wrong_share
from tests.support.command import call


def write_rows(file: Path, num_rows: int) -> None:
    rows = [{"question": f"6*{number}?", "answer": str(6 * number)} for number in range(num_rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", 300)


@pytest.mark.parametrize(
    ("model", "gpus", "learners", "engines", "colocates"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 0, 1, 1, False),
        ("Qwen/Qwen2.5-0.5B-Instruct", 1, 1, 1, True),
        ("Qwen/Qwen2.5-0.5B-Instruct", 4, 1, 3, False),
        ("org/some-7B", 8, 3, 5, False),
    ],
)
def test_a_config_fits_the_model_to_the_gpus_and_has_an_eval_set(
    model: str, gpus: int, learners: int, engines: int, colocates: bool
) -> None:
    result = call("init", "a.yaml", "--model", model, "--data", "rows.jsonl", "--gpus", str(gpus))
    assert result.exit_code == 0, result.output
    config = load_config("a.yaml")
    assert (config.run.name, config.data.train.prompt_field, config.data.train.answer_field) == (
        "a", "question", "answer"
    )  # fmt: skip
    assert (config.placement.learners_per_node, config.engine.engines_per_node) == (learners, engines)
    assert config.placement.colocate is colocates and (config.model.device == "cpu") == (gpus == 0)
    assert config.data.has_eval and config.eval.every is not None
    assert config.train.max_tokens_per_microbatch == (1024 if gpus == 0 else 8192)


@pytest.mark.parametrize("num_rows", [2, 5, 12, 100, 3000])
@pytest.mark.parametrize("gpus", [0, 1])
def test_a_file_of_any_size_is_split_and_trained_on_for_at_least_20_steps(
    num_rows: int, gpus: int, tmp_path: Path
) -> None:
    write_rows(tmp_path / "rows.jsonl", num_rows)
    result = call("init", "a.yaml", "--model", "org/m-1B", "--data", "rows.jsonl", "--gpus", str(gpus))
    assert result.exit_code == 0, result.stderr
    config = load_config("a.yaml")
    refuse_wrong_share(config, tmp_path)
    hashes = [*prompt_hashes(config.data.train.model_copy(update={"path": "rows.jsonl"}))]
    num_held = sum(number < held_out_below(config.data.held_out or 0.0) for number in hashes)
    assert min(8, num_rows // 4) <= num_held < num_rows
    steps = train_length(config, num_rows - num_held).total_steps
    assert steps >= 20 and config.eval.every is not None and steps > 3 * (config.eval.every.steps or 0)
    assert config.train.lr == (1e-6 if num_rows == 3000 else 5e-6)


@pytest.mark.parametrize("place", ["~/rows.jsonl", "$HOME/rows.jsonl"])
def test_a_path_with_the_home_in_it_is_read_as_the_shell_reads_it(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "rows.jsonl").write_text('{"problem": "6*7?", "solution": "42"}\n' * 2)
    result = call("init", "a.yaml", "--model", "org/m-1B", f"--data={place}", "--eval", place, "--gpus", "1")
    assert result.exit_code == 0, result.stderr
    train = load_config("a.yaml").data.train
    assert (train.path, train.prompt_field) == (str(tmp_path / "home" / "rows.jsonl"), "problem")


@pytest.mark.parametrize("rows", ["odd.jsonl", "org/rows"])
def test_columns_with_names_of_their_own_are_given(tmp_path: Path, rows: str) -> None:
    (tmp_path / "odd.jsonl").write_text('{"asked": "6*7?", "n": 42}\n{"asked": "6*8?", "n": 48}\n')
    columns = ["--prompt-field", "asked", "--answer-field", "n"]
    result = call("init", "a.yaml", "--model", "org/m-1B", "--data", rows, "--gpus", "1", *columns)
    assert result.exit_code == 0, result.stderr
    train = load_config("a.yaml").data.train
    assert (train.prompt_field, train.answer_field) == ("asked", "n")


def test_a_column_that_is_not_there_is_one_error(tmp_path: Path) -> None:
    result = call("init", "a.yaml", "--model", "org/m-1B", "--data", "rows.jsonl", "--prompt-field", "asked")
    assert (result.exit_code, "there is no field 'asked'" in result.stderr) == (EXIT_CONFIG, True), result.stderr
    assert not (tmp_path / "a.yaml").exists()


def test_an_eval_file_leaves_all_rows_to_train_on(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 1)
    call("init", "a.yaml", "--model", "org/m-1B", "--data", "rows.jsonl", "--eval", "rows.jsonl", "--gpus", "1")
    config = load_config("a.yaml")
    assert (config.data.held_out, config.train.total_epochs) == (None, 20 * config.rollout.prompts_per_step)


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "my_run.yaml").write_text("mine")
    result = call("init", "--model", "org/m", "--data", "rows.jsonl")
    assert (result.exit_code, (tmp_path / "my_run.yaml").read_text()) == (EXIT_CONFIG, "mine")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model and --data must be given"),
        (["--model", "org/m", "--data", "rows.jsonl", "--eval", "2"], "a share above 0 and below 1"),
        (["--model", "org/m", "--data", "rows.jsonl", "--eval", "0.5%"], "a share above 0 and below 1"),
        (["--model", "org/m", "--data", "rows.jsonl", "--eval", "1e-9"], "would hold out 1e-09 of"),
        (["--model", "org/m", "--data", "one.jsonl"], "of 1 prompt, which is none of them or all. Give a file: --eval"),
        (["--model", "org/m", "--data", "odd.jsonl"], "has the columns x, and none has the name of a prompt"),
        (["--model", "org/m", "--data", "asks.jsonl"], "Name it with --answer-field."),
        (["--model", "org/m", "--data", "empty.jsonl"], "empty.jsonl is empty. It must hold at least one item."),
        (["--model", "org/m", "--data", "rows.csv"], "files must end in"),
        (["a.txt", "--model", "org/m", "--data", "rows.jsonl"], "FILE = a.txt: the name must end in .yaml or .yml"),
        (["--model", "~no_such_user/m", "--data", "rows.jsonl", "--gpus", "0"], "has the home ~no_such_user"),
        (["rows.csv/a.yaml", "--model", "org/m-1B", "--data", "rows.jsonl"], "rows.csv/a.yaml cannot be written ("),
        (["--model", "org/m", "--data", "rows.jsonl", "--reward", "corectness"], "did you mean 'correctness'?"),
    ],
)
def test_what_cannot_be_written_is_one_error(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "odd.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "asks.jsonl").write_text('{"question": "1 + 1?", "n": "2"}\n{"question": "1 + 2?", "n": "3"}\n')
    (tmp_path / "one.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "rows.csv").write_text("question,answer\n1 + 1?,2\n")
    result = call("init", *words)
    assert (result.exit_code, said in result.stderr) == (EXIT_CONFIG, True), result.stderr
    assert not (tmp_path / "my_run.yaml").exists() and not (tmp_path / "a.txt").exists()


def test_a_name_with_a_space_is_quoted_in_the_next_commands() -> None:
    result = call("init", "my runs/a.yaml", "--model", "org/m-1B", "--data", "rows.jsonl")
    assert "Next: hpc-grpo plan 'my runs/a.yaml'; then hpc-grpo train 'my runs/a.yaml'," in result.output


def test_what_is_not_there_yet_is_named(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def f(): ...")
    result = call("init", "--model", "org/m-1B", "--data", "gone.jsonl", "--reward", "my.py:g")
    assert result.exit_code == 0
    config = load_config("my_run.yaml")
    assert (config.train.total_epochs, config.train.lr, config.data.held_out) == (1, 1e-6, 0.05)
    assert f"Not there yet: data.train.path = gone.jsonl: there is no {tmp_path}/gone.jsonl.\n" in result.stderr
    assert f"Not there yet: rewards.0.name = my.py:g: {tmp_path}/my.py has no 'g'. It has: f.\n" in result.stderr


def test_questions_are_asked_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.cli.init.is_asked", lambda: True)
    result = CliRunner().invoke(main, ["init"], input="org/m-1B\nrows.jsonl\nmath\nfour\n4\n\n")
    assert result.exit_code == 0, result.output
    assert "'four' is not a valid integer" in result.stderr
    config = load_config("my_run.yaml")
    assert (config.model.path, config.rewards[0].name, config.data.held_out) == ("org/m-1B", "math", 0.05)


def test_config_shows_keys_sections_and_what_is_changed() -> None:
    assert call("config", "local/debug", "train.lr").output.startswith("train.lr = 0.0001 ")
    section = call("config", "local/debug", "checkpoint", "train.lr=1").output
    assert "checkpoint.every = 2 steps" in section and "train.lr" not in section
    changed = call("config", "local/debug", "--changed").output
    assert "train.lr = 0.0001" in changed and "train.schedule" not in changed and "run.name = debug" in changed
    wrong = call("config", "local/debug", "train.lrr")
    assert (wrong.exit_code, "did you mean 'train.lr'?" in wrong.stderr) == (EXIT_CONFIG, True)
    assert json.loads(call("config", "local/debug", "--json").output)["train"]["lr"] == 1e-4
    for words in (["train.lr", "--json"], ["--changed", "--yaml"], ["--yaml", "--json"]):
        refused = call("config", "local/debug", *words)
        assert (refused.exit_code, refused.stdout) == (EXIT_CONFIG, "")
        assert "Give one of these: --json, --yaml, or KEY and --changed." in refused.stderr


def test_a_plan_is_json_too() -> None:
    found = json.loads(call("plan", "local/debug", "--size", "7B", "--gpu-memory-gib", "8", "--json").stdout)
    assert found["fits"] is False and found["problems"]
    for option, value in (("--gpu-memory-gib", "nan"), ("--host-memory-gib", "inf")):
        refused = call("plan", "local/debug", "--size", "7B", option, value)
        assert (refused.exit_code, f"{option} = {value}" in refused.stderr) == (EXIT_CONFIG, True)
    several = call("plan", "local/debug", "--nodes", "2,4")
    assert (several.exit_code, "need a RUN" in several.stderr) == (EXIT_CONFIG, True)
