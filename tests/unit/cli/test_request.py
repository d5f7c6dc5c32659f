from __future__ import annotations

from pathlib import Path

import pytest

from hpc_grpo.cli.request import load_request, read_shell_config
from hpc_grpo.errors import ConfigError


def script(folder: Path, text: str) -> Path:
    path = folder / "run.sh"
    path.write_text(text)
    return path


def test_an_array_keeps_words_with_spaces(tmp_path: Path) -> None:
    path = script(tmp_path, 'TRAINING_ARGS=(local/debug --set "data.system_prompt=be brief" train.lr=1e-6)\n')
    shell = read_shell_config(path)
    assert shell.config_name == "local/debug"
    assert shell.overrides == ["data.system_prompt=be brief", "train.lr=1e-6"]


def test_a_string_is_split_as_a_shell_would(tmp_path: Path) -> None:
    path = script(tmp_path, "export TRAINING_ARGS=\"local/debug --set=train.lr=1e-6 'run.name=a b'\"\n")
    assert read_shell_config(path).overrides == ["train.lr=1e-6", "run.name=a b"]


def test_settings_become_keys_and_explicit_overrides_win(tmp_path: Path) -> None:
    path = script(tmp_path, "TRAINING_ARGS=(local/debug)\nMAX_JOB_CHAINS=5\nNUM_NODES=4\n")
    request = load_request(str(path), ["launch.num_nodes=2"])
    assert request.config.launch.slurm.max_job_chains == 5
    assert request.config.launch.num_nodes == 2


def test_a_setting_of_the_callers_shell_is_not_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUM_NODES", "9")
    assert read_shell_config(script(tmp_path, "TRAINING_ARGS=local/debug\n")).overrides == []


def test_exports_reach_training_by_name_and_no_value_reaches_the_config(tmp_path: Path) -> None:
    text = (
        "TRAINING_ARGS=(local/debug)\nexport NCCL_DEBUG=INFO JUDGE_URL='http://j ?' JUDGE_API_KEY=abc\nexport RANK=3\n"
        "NOT_EXPORTED=1\necho hello\n"
    )
    request = load_request(str(script(tmp_path, text)), [])
    assert request.exported["NCCL_DEBUG"] == "INFO"
    assert request.exported["JUDGE_API_KEY"] == "abc"
    assert "NOT_EXPORTED" not in request.exported
    assert request.config.launch.env == {}
    assert sorted(request.config.launch.pass_env) == ["JUDGE_API_KEY", "JUDGE_URL"]
    assert not any(value in str(request.config) for value in ("abc", "http://j ?"))


def test_a_config_beside_the_script_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("base: other.yaml\nrun: {name: mine}\n")
    (tmp_path / "other.yaml").write_text(
        "model: {path: m}\ndata: {train: {path: d}}\ntrain: {total_steps: 1}\nlaunch: {interface: hsn0}\n"
    )
    request = load_request(str(script(tmp_path, "TRAINING_ARGS=mine.yaml\n")), [])
    assert request.config.run.name == "mine"
    assert request.config.launch.interface == "hsn0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("X=1\n", "does not set TRAINING_ARGS"),
        ("false\n", "failed with exit code 1"),
        ("echo broken >&2; exit 3\n", "failed with exit code 3: broken"),
        ("exit 0\n", "ended the shell"),
        ("TRAINING_ARGS=(a.yaml b.yaml)\n", "exactly one config"),
        ("TRAINING_ARGS=()\n", "exactly one config"),
        ("TRAINING_ARGS=(a.yaml --learning_rate 1)\n", "'--learning_rate'; valid are"),
        ("TRAINING_ARGS=(a.yaml --set)\n", "ends with --set"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read_shell_config(script(tmp_path, text))


def test_a_missing_script_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_request(str(tmp_path / "nope.sh"), [])
