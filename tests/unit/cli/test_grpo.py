"""`hpc-grpo grpo` and `train_grpo.py`: the options become a config, the export becomes the output folder's model."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.cli import grpo
from hpc_grpo.cli.grpo import config_values, hand_over
from hpc_grpo.config import load_config
from hpc_grpo.errors import ConfigError
from hpc_grpo.run.paths import RunDir
from tests.support.command import call

REPOSITORY = Path(__file__).resolve().parents[3]
WORDS = ("--model=m", "--dataset=d.jsonl", "--reward_function=correctness")
GIVEN = {
    "model": "facebook/opt-1.3b",
    "dataset": "/data/my_dataset.json",
    "reward_function": "correctness",
    "max_steps": 300,
    "output_dir": Path("outputs"),
    "preprocessing": "generic",
    "learning_rate": 5e-6,
    "batch_size": 1,
    "num_generations": 4,
    "max_prompt_length": 256,
    "max_completion_length": 128,
    "use_unsloth": False,
    "lora_r": None,
}


def loaded(tmp_path: Path, num_gpus: int, **changes: Any) -> Any:
    file = tmp_path / "train_grpo.yaml"
    file.write_text(yaml.safe_dump(config_values(GIVEN | changes, tmp_path, num_gpus)))
    return load_config(str(file))


def test_the_options_are_the_config_of_the_run(tmp_path: Path) -> None:
    config = loaded(tmp_path, 0)
    assert config.run_path == tmp_path / "run"
    assert (config.model.path, config.model.device, config.model.dtype) == ("facebook/opt-1.3b", "cpu", "float32")
    assert (config.data.train.path, config.data.train.prompt_field) == ("/data/my_dataset.json", "prompt")
    assert (config.data.template, config.data.preprocessing, config.data.max_prompt_tokens) == ("plain", "generic", 256)
    assert [reward.name for reward in config.rewards] == ["exact"]
    assert (config.rollout.prompts_per_step, config.rollout.group_size, config.rollout.max_new_tokens) == (1, 4, 128)
    assert (config.train.total_steps, config.train.lr) == (300, 5e-6)


def test_deepseek_is_its_prompt_as_a_chat(tmp_path: Path) -> None:
    data = loaded(tmp_path, 0, preprocessing="deepseek").data
    assert (data.template, data.preprocessing) == ("chat", "deepseek")


def test_long_sequences_fit_a_microbatch(tmp_path: Path) -> None:
    assert loaded(tmp_path, 0, max_completion_length=20_000).train.max_tokens_per_microbatch == 20_256


@pytest.mark.parametrize(("num_gpus", "learners", "engines"), [(1, 1, 1), (2, 1, 1), (4, 1, 3), (8, 2, 6)])
def test_all_gpus_learn_or_sample(tmp_path: Path, num_gpus: int, learners: int, engines: int) -> None:
    config = loaded(tmp_path, num_gpus)
    assert (config.placement.learners_per_node, config.engine.engines_per_node) == (learners, engines)
    assert config.model.device == "auto"
    assert config.placement.colocate is (num_gpus == 1)


def test_unsloth_is_taken_and_correctness_compares_texts_and_both_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo, "run_until_over", lambda _command: 75)
    result = call("grpo", *WORDS, "--use_unsloth", f"--output_dir={tmp_path}")
    assert result.exit_code == 75
    assert "--use_unsloth: trains a LoRA adapter, by peft and DeepSpeed on all GPUs." in result.stderr
    assert "--reward_function correctness is exact here." in result.stderr
    assert [reward.name for reward in load_config(str(tmp_path / "train_grpo.yaml")).rewards] == ["exact"]


@pytest.mark.parametrize(("options", "rank"), [({}, None), ({"use_unsloth": True}, 16), ({"lora_r": 8}, 8)])
def test_unsloth_and_a_rank_train_an_adapter(tmp_path: Path, options: dict[str, Any], rank: int | None) -> None:
    lora = loaded(tmp_path, 1, **options).lora
    assert (lora and lora.rank) == rank


def test_the_exit_code_of_training_is_the_commands(tmp_path: Path) -> None:
    """A reward that does not exist is refused by `hpc-grpo train`, in a process of its own."""
    words = ["--model=m", "--dataset=d.jsonl", "--reward_function=corectness", f"--output_dir={tmp_path / 'out'}"]
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train_grpo.py"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 78, done.stderr
    assert "did you mean 'correctness'?" in done.stderr


def test_signals_reach_the_training_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    child = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
    child += f"open({str(tmp_path / 'up')!r}, 'w').close()\ntime.sleep(60)\n"
    parent = "import sys; from hpc_grpo.cli.train import run_until_over\n"
    parent += f"sys.exit(run_until_over([sys.executable, '-c', {child!r}]))"
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(30) == 75


def test_the_final_export_becomes_the_output_folders_model(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for step in (1, 2):
        run.export(step).mkdir(parents=True)
        (run.export(step) / "config.json").write_text(json.dumps({"step": step}))
        (run.export(step) / "model.safetensors").write_bytes(bytes([step]))
    (tmp_path / "config.json").write_text("an older one")
    hand_over(run, tmp_path)
    hand_over(run, tmp_path)  # the same command again
    assert json.loads((tmp_path / "config.json").read_text()) == {"step": 2}
    assert (tmp_path / "model.safetensors").read_bytes() == b"\2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "run"]


def test_a_run_without_an_export_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hpc-grpo model export"):
        hand_over(RunDir(tmp_path), tmp_path)
