"""A config that was translated from another system trains, with a tiny model and data put in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_metrics
from tests.integration.training_runs import LETTERS, RUN_DEADLINE_S, write_workspace
from tests.unit.foreign.examples import AREAL, OPEN_INSTRUCT, TRL, VERL, Example

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.long]

SMALL = {
    "run.root": "runs", "run.name": "translated", "model.path": "tied", "model.dtype": "float32", "engine.dtype": None,
    "model.device": "cpu", "data.template": "plain", "data.prompt_format": '"{prompt}\\n"', "data.system_prompt": None,
    "data.train": "{path: train.jsonl}", "data.eval": None, "eval": "{}", "data.max_prompt_tokens": 16,
    "rewards": f"[{{name: '{LETTERS}'}}]", "rollout.prompts_per_step": 4, "rollout.group_size": 2,
    "rollout.max_new_tokens": 16, "rollout.stop": "[e, qq]", "rollout.max_policy_lag": 0, "train.num_minibatches": 1,
    "train.zero_stage": 1, "train.max_tokens_per_microbatch": 512, "train.attention": "sdpa", "train.total_steps": 2,
    "train.total_epochs": None, "train.total_episodes": None, "engine.tensor_parallel": 1,
    "engine.engines_per_node": 1, "engine.kv_cache_gib": 0.0625, "engine.vllm.max_num_seqs": 32,
    "placement.learners_per_node": 1, "launch.num_nodes": 1, "launch.slurm.gpus_per_node": 0,
    "launch.object_store_gib": 0.1, "data.curriculum": None, "metrics.names": "areal",
}  # fmt: skip


@pytest.mark.parametrize(
    ("option", "example"),
    [
        ("--from-trl", TRL["qwen-1.5b"]),
        ("--from-areal", AREAL["boba-1.0.4"]),
        ("--from-verl", VERL["qwen2-7b"]),
        ("--from-open-instruct", OPEN_INSTRUCT["gsm8k"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_translated_example_trains(option: str, example: Example, tmp_path: Path) -> None:
    write_workspace(tmp_path)
    sets = [word for key, value in SMALL.items() for word in ("--set", f"{key}={'null' if value is None else value}")]
    command = [sys.executable, "-m", "hpc_grpo.cli"]
    translate = [*command, "config", option, *words_of(option, example, tmp_path), "--out", "ours.yaml", *sets]
    subprocess.run(translate, cwd=tmp_path, check=True, timeout=RUN_DEADLINE_S, env=None)
    subprocess.run([*command, "train", "ours.yaml"], cwd=tmp_path, check=True, timeout=RUN_DEADLINE_S)
    run = RunDir(tmp_path / "runs" / "translated")
    assert run.is_complete()
    metrics = read_metrics(run.metrics)
    assert sorted(metrics)[-2:] == [1, 2]
    # A text of rollout.stop ends a completion, whose last tokens engine and learner score alike.
    texts = [line["completion"] for path in run.path.glob("rollouts/step_*.jsonl") for line in lines_of(path)]
    assert {text.find("e") for text in texts} > {-1}
    assert all(text.find("e") in (-1, len(text) - 1) for text in texts)
    assert metrics[2]["mismatch/logprob_abs_diff_max"] < 1e-3


def lines_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words_of(option: str, example: Example, folder: Path) -> list[str]:
    """The example as its system has it: a file of YAML, hydra's words, or options."""
    if option in ("--from-trl", "--from-areal"):
        (folder / "theirs.yaml").write_text(yaml.safe_dump(example.keys))
        return ["theirs.yaml"]
    if option == "--from-verl":
        return [f"{key}={json.dumps(value)}" for key, value in example.keys.items()]
    values = {key: value if isinstance(value, list) else [value] for key, value in example.keys.items()}
    return [word for key, own in values.items() for word in (f"--{key}", *map(str, own))]


def test_train_grpo_leaves_the_model_in_its_output_folder(tmp_path: Path) -> None:
    write_workspace(tmp_path)
    items = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    data = [{"prompt": item["question"], "answer": item["answer"]} for item in items]
    (tmp_path / "data.json").write_text(json.dumps(data))
    words = ["--model=tied", "--dataset=data.json", "--reward_function=correctness", "--max_steps=2", "--batch_size=4"]
    words += ["--max_prompt_length=16", "--max_completion_length=16", "--output_dir=out"]
    small = ["launch.object_store_gib=0.1", "engine.kv_cache_gib=0.0625", "engine.vllm.max_num_seqs=32"]
    command = [sys.executable, str(REPOSITORY / "train_grpo.py"), *words, *small]
    for _ in range(2):  # a run that is complete stays so
        subprocess.run(command, cwd=tmp_path, check=True, timeout=RUN_DEADLINE_S)
        assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"]
        assert (tmp_path / "out" / "model.safetensors").stat().st_size > 0
        assert (tmp_path / "out" / "tokenizer.json").is_file()
