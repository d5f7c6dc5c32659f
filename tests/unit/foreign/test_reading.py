"""Interpolations, hydra's words, options, and scripts that come to a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.foreign import open_instruct
from hpc_grpo.foreign.reading import read_nested, read_options, read_script, read_words
from hpc_grpo.foreign.systems import SYSTEMS


def test_interpolations_are_written_out_and_words_win(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("n: 4\na: {b: '${n}', c: 'x-${n}', d: '${a.b}', e: '${f}'}\nf: {g: 1e-6}\n")
    assert read_nested(file, {"n": 5, "new.key": [1, 2]}, {}) == {
        "n": 5, "a.b": 5, "a.c": "x-5", "a.d": 5, "a.e": "${f}", "f.g": 1e-6, "new.key": [1, 2],
    }  # fmt: skip


def test_an_interpolation_may_be_of_upstreams_default_and_is_an_error_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: ${nothing.here}\n")
    assert read_nested(tmp_path / "a.yaml", {}, {"nothing.here": 7}) == {"a": 7}
    with pytest.raises(ConfigError, match=r"there is no key nothing\.here"):
        read_nested(tmp_path / "a.yaml", {}, {})


def test_words_of_hydra_are_values_of_yaml() -> None:
    assert read_words(["a.b=1e-6", "++c=['x','y']", "d=null"]) == {"a.b": 1e-6, "c": ["x", "y"], "d": None}
    with pytest.raises(ConfigError, match="must have the form key=value"):
        read_words(["--a"])


def test_options_may_have_no_value_one_or_several() -> None:
    assert read_options(["--flag", "--n", "-1", "--list", "a", "1.0", "b", "16", "--equals=x"]) == {
        "flag": True, "n": -1, "list": ["a", 1.0, "b", 16], "equals": "x",
    }  # fmt: skip


def test_options_of_open_instruct_may_have_dashes_and_switch_off() -> None:
    words = ["--learning-rate", "1e-5", "--no_load_ref_policy", "--no-use-rho-correction", "--no_resampling_pass_rate",
             "0.9", "--active_sampling"]  # fmt: skip
    assert open_instruct.read(words) == {
        "learning_rate": 1e-5, "load_ref_policy": False, "use_rho_correction": False, "no_resampling_pass_rate": 0.9,
        "active_sampling": True,
    }  # fmt: skip
    found = SYSTEMS["open_instruct"].translate(words)[1].ours
    assert (found["train.lr"], found["loss.correction.name"]) == (1e-5, "none")


def test_an_option_may_be_a_text_that_is_no_yaml() -> None:
    text = "{prompt}\n\nPlease reason step by step."
    assert read_options(["--user_prompt_transform", text]) == {"user_prompt_transform": text}


GRPO = r"grpo\w*\.py"


def script(folder: Path, text: str) -> Path:
    (folder / "run.sh").write_text(text)
    return folder / "run.sh"


def test_a_script_runs_to_its_command_and_no_further(tmp_path: Path) -> None:
    text = (
        "set -euxo pipefail\nN=8\nwho=$(account whoami | nojq -r .name)\nIMAGE=${1:-none}\nshift\nulimit -n 99999999\n"
        "python prepare.py --for grpo\n"
        "python mason.py --num_nodes $N --gpus 8 -- source setup.sh \\&\\& uv run open_instruct/grpo_fast.py \\\n"
        f'    --seed 3 --exp_name $(basename /a/grpo_x) --image $IMAGE "$@" 2>&1 | tee log\n: > {tmp_path / "after"}\n'
    )
    before, after, told = read_script(script(tmp_path, text), ["image", "--beta", "0.1"], GRPO)
    assert before is not None
    assert before[:4] == ["python", "mason.py", "--num_nodes", "8"]
    assert after == ["--seed", "3", "--exp_name", "grpo_x", "--image", "image", "--beta", "0.1"]
    assert {"account", "nojq", "python"} <= set(told[len(" (not run: ") : -1].split(", "))
    assert not (tmp_path / "after").exists()


@pytest.mark.parametrize(
    "line", ["srun -n 1 bash -c x python grpo.py --a", "exec nowhere grpo.py --a", "PATH=/usr/bin; uv run grpo.py --a"]
)
def test_a_command_may_stand_behind_another(tmp_path: Path, line: str) -> None:
    assert read_script(script(tmp_path, line), [], GRPO)[1] == ["--a"]


def test_a_script_may_hold_its_words_in_training_args(tmp_path: Path) -> None:
    text = "TRAINING_ARGS=\"\\\n  --stop_strings '</answer>' \\\n  --seed 1 \\\n\"\n"
    assert read_script(script(tmp_path, text), [], GRPO) == (None, ["--stop_strings", "</answer>", "--seed", "1"], "")


def test_a_command_inside_a_longer_word_is_no_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs no command with grpo\*\.py\. Give the command's own words instead"):
        read_script(script(tmp_path, 'srun bash -c "python grpo.py --a"\n'), [], GRPO)


def test_a_program_whose_name_only_begins_alike_is_another_program(tmp_path: Path) -> None:
    other = script(tmp_path, "python3 -m verl.trainer.main_ppo_sync a=1\n")
    with pytest.raises(ConfigError, match=r"main_ppo\. Give the command's own words instead"):
        read_script(other, [], r"verl\.trainer\.main_ppo")
    both = script(tmp_path, "python3 -m verl.trainer.main_ppo_sync a=1\npython3 -m verl.trainer.main_ppo a=2\n")
    assert read_script(both, [], r"verl\.trainer\.main_ppo")[1] == ["a=2"]


def test_a_script_without_a_command_is_an_error_with_what_bash_says(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs no command with grpo.*line 2: NODES: unbound variable"):
        read_script(script(tmp_path, "set -u\necho $NODES\n"), [], GRPO)
