"""`hpc-grpo reward`: real workers, no training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import call

QUESTION = ("--prompt", "2+2?")


def write_lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_completions_are_scored_each_on_a_line() -> None:
    done = call("reward", "test", "math", *QUESTION, "--completion", "4", "--completion", "5", "--answer", "4")
    assert done.exit_code == 0
    assert done.stdout.split() == ["1", "4", "0", "5"]


def test_arguments_and_columns_reach_the_reward() -> None:
    words = ("--completion", "red, blue", "--field", "colours=[red, green]", "--arg", "keyword_field=colours")
    done = call("reward", "test", "keyword_match", *QUESTION, *words)
    assert done.stdout.split()[0] == "0.5"


def test_a_file_of_the_users_is_scored_too(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("async def size(prompts, completions):\n    return [len(text) for text in completions]\n")
    assert call("reward", "test", f"{own}:size", *QUESTION, "--completion", "abc").stdout.split()[0] == "3"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("maths", "--completion", "4"), "did you mean 'math'?"),
        (
            ("math", "--completion", "4"),
            "answer_field to the column of the reference answer; for reward test, give --a",
        ),
        (("repetition", "--completion", "4", "--arg", "ngram=0"), "greater than 0"),
        (("regex", "--completion", "4", "--arg", "patern=x"), "unknown key; did you mean 'pattern'?"),
        (("regex", "--completion", "4", "--arg", "pattern"), "must be KEY=VALUE"),
        (("regex", "--completion", "4", "--arg", "pattern=[a"), "not valid YAML"),
        (("regex", "--completion", "a" * 40, "--arg", "pattern=^(a+)+b", "--timeout", "0.5"), "within 0.5 s"),
    ],
)
def test_what_would_end_a_run_ends_the_command_with_its_reason(words: tuple[str, ...], message: str) -> None:
    done = call("reward", "test", *words, *QUESTION)
    assert done.exit_code == 78
    assert message in done.stderr


def test_a_server_without_a_token_says_who_could_reach_it_after_what_the_command_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HPC_GRPO_REWARD_TOKEN", raising=False)
    assert "Give either --reward NAME" in call("reward", "serve").stderr
    unset = call("reward", "serve", "--reward", "math").stderr
    assert "HPC_GRPO_REWARD_TOKEN is not set; it must have at least 16 characters" in unset
    assert "executes code for everybody who reaches 127.0.0.1." in unset
    monkeypatch.setenv("HPC_GRPO_REWARD_TOKEN", "abc")
    assert "HPC_GRPO_REWARD_TOKEN has 3 characters; it must" in call("reward", "serve", "--reward", "math").stderr


def test_a_file_is_scored_line_by_line_and_failures_are_named(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def f(prompts, completions, **c):\n    assert completions[0] != 'bad', 'odd'\n    return [2.0, 4.0]\n"
    )
    rows = [{"prompt": "p", "completions": ["good", "x"]}, {"prompt": "p", "completions": ["bad", "x"]}]
    file = write_lines(tmp_path / "rows.jsonl", *rows)
    done = call("reward", "score", file, "--reward", f"{own}:f")
    assert done.stdout.splitlines()[2].split() == ["all,", "weighted", "2", "3", "2", "4"]
    assert "1 of 2 lines could not be scored" in done.stdout
    assert "line 2: " in done.stdout
    assert "AssertionError: odd" in done.stdout


def test_json_has_the_parts_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(
        "{run: {name: n}, model: {path: m}, data: {train: {path: d}}, train: {total_steps: 1},"
        " rewards: [{name: math}, {name: regex, weight: 0.5, args: {pattern: '[.]$'}}]}"
    )
    file = write_lines(tmp_path / "rows.jsonl", {"prompt": "p", "completion": "It is 4.", "answer": 4})
    [group] = json.loads(call("reward", "score", file, "--config", str(config), "--json").stdout)
    assert group == {
        "rewards": [1.5],
        "parts": {"math": [1.0], "regex": [1.0]},
        "errors": [],
        "over_budget": [""],
    }


def config_of(path: Path, data: str) -> str:
    text = (
        f"{{run: {{name: n}}, model: {{path: m}}, train: {{total_steps: 1}}, data: {data}, rewards: [{{name: math}}]}}"
    )
    path.write_text(text)
    return str(path)


def test_the_rewards_and_the_answer_of_a_config_are_those_of_its_training_data(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", {"prompt": "p", "completion": "4", "by": {"hand": "#### 4"}})
    of_sources = "rewards: [{name: gsm8k, args: {method: flexible}}]"
    mix = f"[{{path: a, answer_field: by.hand, {of_sources}}}, {{path: b, {of_sources}}}]"
    config = config_of(tmp_path / "run.yaml", f"{{train: {{mix: {mix}}}, eval: {{path: c}}}}")
    [group] = json.loads(call("reward", "score", file, "--config", config, "--json").stdout)
    assert (group["parts"], group["errors"]) == ({"gsm8k": [1.0]}, [])


@pytest.mark.parametrize("words", [("score", "rows.jsonl"), ("serve",)])
def test_a_config_whose_sources_differ_in_rewards_names_no_reward(
    tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_GRPO_REWARD_TOKEN", "t" * 32)
    write_lines(tmp_path / "rows.jsonl", {"prompt": "p", "completion": "4", "answer": "4"})
    mix = "[{path: a}, {path: b, rewards: [{name: gsm8k}]}]"
    done = call("reward", *words, "--config", config_of(tmp_path / "run.yaml", f"{{train: {{mix: {mix}}}}}"))
    assert done.exit_code == 78
    assert "differ in rewards. Choose one: --reward NAME." in done.stderr


@pytest.mark.parametrize(
    "row", [{"prompt": "p"}, {"prompt": 1, "completion": "c"}, {"prompt": "p", "completions": "c"}, ["p", "c"], "p"]
)
def test_a_line_that_is_no_completion_is_named_by_its_number(tmp_path: Path, row: Any) -> None:
    file = write_lines(tmp_path / "rows.jsonl", {"prompt": "p", "completion": "c"}, row)
    done = call("reward", "score", file, "--reward", "repetition")
    assert done.exit_code == 78
    assert "rows.jsonl:2 must be a JSON object" in done.stderr


def test_lines_end_at_newlines_alone_and_must_be_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes('{"prompt": "p\u2028q", "completion": "c"}\n'.encode())
    assert call("reward", "score", str(file), "--reward", "repetition").exit_code == 0
    file.write_bytes(b'{"prompt": "\xff", "completion": "c"}\n')
    done = call("reward", "score", str(file), "--reward", "repetition")
    assert done.exit_code == 78
    assert "rows.jsonl:1 must be a JSON object" in done.stderr
