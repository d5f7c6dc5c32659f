"""Interpolations, hydra's words, options, and scripts that come to a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.foreign.reading import command_words, read_nested, read_options, read_words


def test_interpolations_are_written_out_and_words_win(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("n: 4\na: {b: '${n}', c: 'x-${n}', d: '${a.b}', e: '${f}'}\nf: {g: 1e-6}\n")
    assert read_nested(file, ["n=5", "+new.key=[1, 2]"]) == {
        "n": 5, "a.b": 5, "a.c": "x-5", "a.d": 5, "a.e": "${f}", "f.g": 1e-6, "new.key": [1, 2],
    }  # fmt: skip


def test_an_interpolation_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: ${nothing.here}\n")
    with pytest.raises(ConfigError, match=r"there is no key nothing\.here"):
        read_nested(tmp_path / "a.yaml")


def test_words_of_hydra_are_values_of_yaml() -> None:
    assert read_words(["a.b=1e-6", "++c=['x','y']", "d=null"]) == {"a.b": 1e-6, "c": ["x", "y"], "d": None}
    with pytest.raises(ConfigError, match="must have the form key=value"):
        read_words(["--a"])


def test_options_may_have_no_value_one_or_several() -> None:
    assert read_options(["--flag", "--n", "-1", "--list", "a", "1.0", "b", "16", "--equals=x"]) == {
        "flag": True, "n": -1, "list": ["a", 1.0, "b", 16], "equals": "x",
    }  # fmt: skip


def test_an_option_may_be_a_text_that_is_no_yaml() -> None:
    text = "{prompt}\n\nPlease reason step by step."
    assert read_options(["--user_prompt_transform", text]) == {"user_prompt_transform": text}


def test_a_script_runs_to_its_command_and_no_further(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "set -x\nN=8\nwho=$(account whoami | jq -r .name)\nIMAGE=${1:-none}\nshift\n"
        "python mason.py --num_nodes $N --gpus 8 -- source setup.sh \\&\\& uv run open_instruct/grpo_fast.py \\\n"
        f'    --seed 3 --name $IMAGE "$@"\ntouch {tmp_path / "after"}\n'
    )
    before, after = command_words(script, ["image", "--beta", "0.1"], "grpo")
    assert before[:4] == ["mason.py", "--num_nodes", "8", "--gpus"]
    assert after == ["--seed", "3", "--name", "image", "--beta", "0.1"]
    assert not (tmp_path / "after").exists()


def test_a_script_without_such_a_command_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo hello\n")
    with pytest.raises(ConfigError, match="comes to no command with main_ppo"):
        command_words(tmp_path / "run.sh", [], "main_ppo")
