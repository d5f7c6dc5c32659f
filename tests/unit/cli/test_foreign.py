"""`hpc-grpo config --from-…` as a user calls it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml
from click.testing import Result

from hpc_grpo.config import load_config
from tests.support.command import call
from tests.unit.foreign.examples import AREAL, OPEN_INSTRUCT, TRL, VERL


@pytest.fixture
def areal_file(tmp_path: Path) -> Path:
    return written(tmp_path, AREAL["boba-1.0.4"].keys)


def written(folder: Path, keys: dict[str, object]) -> Path:
    file = folder / "theirs.yaml"
    file.write_text(yaml.safe_dump(keys))
    return file


def loaded(result: Result, folder: Path) -> object:
    """Load what the command printed, as `hpc-grpo train` would."""
    assert result.exit_code == 0, result.stderr
    (folder / "ours.yaml").write_text(result.stdout)
    return load_config(str(folder / "ours.yaml"))


def test_stdout_is_a_config_and_stderr_tells_of_each_key(areal_file: Path, tmp_path: Path) -> None:
    result = call("config", "--from-areal", str(areal_file))
    config = loaded(result, tmp_path)
    assert config.rollout.group_size == 16  # type: ignore[attr-defined]
    assert result.stdout.startswith("# From AReaL: theirs.yaml\nrun:\n")
    assert "rollout.max_policy_lag = 16" in result.stderr
    assert "Of the keys given: 7 translated, with a difference, 52 translated, 54 no counterpart." in result.stderr


def test_their_words_come_after_the_file_and_ours_by_set(areal_file: Path, tmp_path: Path) -> None:
    result = call(
        "config", "--from-areal", str(areal_file), "allocation_mode=vllm:d6+fsdp:d2", "recover_mode=fault",
        "--set", "model.path=tiny",
    )  # fmt: skip
    config = loaded(result, tmp_path)
    assert config.engine.engines_per_node == 6  # type: ignore[attr-defined]
    assert config.model.path == "tiny"  # type: ignore[attr-defined]


def test_what_is_refused_ends_with_78_and_lenient_goes_on(tmp_path: Path) -> None:
    file = written(tmp_path, AREAL["boba"].keys)
    refused = call("config", "--from-areal", str(file))
    assert (refused.exit_code, refused.stdout) == (78, "")
    assert "neither reward_norm nor adv_norm" in refused.stderr
    lenient = call("config", "--from-areal", str(file), "--lenient", "--out", str(tmp_path / "ours.yaml"))
    assert (lenient.exit_code, lenient.stdout) == (0, "")
    assert load_config(str(tmp_path / "ours.yaml")).engine.engines_per_node == 2


def test_an_unknown_key_is_told(areal_file: Path) -> None:
    result = call("config", "--from-areal", str(areal_file), "actor.new_switch=true")
    assert result.exit_code == 0
    assert "UNKNOWN TO THE TABLE" in result.stderr
    assert "actor.new_switch" in result.stderr


def test_trl_takes_the_number_of_processes(tmp_path: Path) -> None:
    file = written(tmp_path, TRL["zero-7b"].keys)
    words = ["num_processes=8", "max_steps=100"]
    config = loaded(call("config", "--from-trl", str(file), "--lenient", *words), tmp_path)
    assert config.train.num_minibatches == 1  # type: ignore[attr-defined]
    assert config.train.warmup_steps == 10  # type: ignore[attr-defined]


def test_verl_is_given_by_its_words_or_its_script(tmp_path: Path) -> None:
    words = [f"{key}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}"
             for key, value in VERL["math"].keys.items()]  # fmt: skip
    by_words = call("config", "--from-verl", *words)
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo \\\n" + " \\\n".join(f'"{word}"' for word in words) + " $@\n")
    by_script = call("config", "--from-verl", str(script))
    assert by_words.exit_code == by_script.exit_code == 0, by_words.stderr
    assert by_words.stdout.split("\n", 1)[1] == by_script.stdout.split("\n", 1)[1]


@pytest.mark.parametrize("form", ["words", "mason", "yaml", "training_args"])
def test_open_instruct_is_given_by_its_options_its_script_or_its_file(tmp_path: Path, form: str) -> None:
    keys = OPEN_INSTRUCT["gsm8k"].keys
    words = [word for key, value in keys.items()
             for word in (f"--{key}", *map(str, value if isinstance(value, list) else [value]))]  # fmt: skip
    script = tmp_path / "run.sh"
    launcher = "python mason.py --task_name grpo_test --num_nodes 1 --gpus 1 -- source setup.sh \\&\\& uv run"
    given = {
        "words": words,
        "yaml": [str(written(tmp_path, keys)), "--seed", "7"],
        "mason": [str(script), "--seed", "7"],
        "training_args": [str(script)],
    }[form]
    line = f"{launcher} open_instruct/grpo_fast.py {shlex.join(words)} $@" if form == "mason" else (
        f'TRAINING_ARGS="{shlex.join(words)}"')  # fmt: skip
    script.write_text(f"{line}\n")
    config = loaded(call("config", "--from-open-instruct", *given), tmp_path)
    assert config.rollout.group_size == 16  # type: ignore[attr-defined]
    project = "geodesic-grpo" if form == "training_args" else "open_instruct_internal"
    assert config.metrics.wandb["project"] == project  # type: ignore[attr-defined]
    assert (config.run.seed == 7) is (form in ("yaml", "mason"))  # type: ignore[attr-defined]


def test_the_names_of_areal_stand_in_the_help() -> None:
    help_text = " ".join(call("config", "--help").output.split())
    for name in ("allocation_mode", "n_nodes", "n_gpus_per_node", "cluster.fileroot", "recover_mode", "ckpt_freq_*"):
        assert name in help_text


@pytest.mark.parametrize("words", [[], ["local/tiny_grpo", "--yml"], ["local/tiny_grpo", "--lenient"], ["--from-verl"]])
def test_a_wrong_call_is_an_error(words: list[str]) -> None:
    assert call("config", *words).exit_code in (2, 78)
