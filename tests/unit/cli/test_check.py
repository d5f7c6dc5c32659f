"""The commands `plan` and `env` as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.cli import check
from hpc_grpo.config import load_config, to_yaml
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.errors import EXIT_CONFIG
from hpc_grpo.plan import disk
from hpc_grpo.plan.memory import HARDWARE
from hpc_grpo.plan.model import FAMILY
from hpc_grpo.system.disk import Room
from hpc_grpo.system.memory import Memory, host_memory
from hpc_grpo.types import GIB
from tests.support.command import call

SECRET = "planted-5f3c-value"
CONFIG_7B = "isambard/grpo_7b_rlzero_general"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for runs below an empty working directory, for models in an empty cache, and always find as much room."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk, "room_in", lambda _: Room(4096 * GIB, "free"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def test_a_node_is_what_hardware_names_but_for_the_memory_that_is_given() -> None:
    by_name = {name: call("plan", CONFIG_7B, "--size", "7B", "--hardware", name).output for name in HARDWARE}
    assumed = call("plan", CONFIG_7B, "--size", "7B")
    assert (by_name["gh200"], "planned for gh200" in assumed.stderr) == (assumed.stdout, True)
    assert len(set(by_name.values())) == len(HARDWARE)
    larger = call("plan", CONFIG_7B, "--size", "7B", "--hardware", "h100-sxm", "--gpu-memory-gib", "140")
    assert larger.output != by_name["h100-sxm"]


def test_without_a_name_the_gpus_of_this_machine_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi = tmp_path / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho '0, NVIDIA H200, 4, 0, GPU-1a, 0:1, 143771'\n")
    nvidia_smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = call("plan", CONFIG_7B, "--size", "7B")
    assert "GPUs of this machine: NVIDIA H200 (--hardware h200)" in found.stderr
    assert found.stdout == call("plan", CONFIG_7B, "--size", "7B", "--hardware", "h200").stdout


def test_gpus_of_a_node_are_given_to_plan_as_to_submit() -> None:
    words = ["plan", "local/debug", "--size", "0.5B", "model.device=auto", "--hardware", "h200"]
    asked = call(*words, "--gpus", "2")
    assert asked.stdout == call(*words, "launch.slurm.gpus_per_node=2").stdout
    assert "requests no GPU" in call(*words).stdout and "requests no GPU" not in asked.stdout


def test_the_exit_code_says_whether_it_fits() -> None:
    assert call("plan", CONFIG_7B, "--size", "7B").exit_code == 0
    result = call("plan", CONFIG_7B, "--size", "32B", "--nodes", "1")
    assert result.exit_code == 78
    assert "  --nodes 3\n" in result.output
    larger = call("plan", CONFIG_7B, "--size", "14B", "--nodes", "1", "--gpu-memory-gib", "180")
    assert larger.exit_code == 0
    assert call("plan", CONFIG_7B, "--size", "7B", "--host-memory-gib", "30").exit_code == 78


def test_a_model_that_is_not_here_is_a_config_error() -> None:
    result = call("plan", CONFIG_7B)
    assert result.exit_code == 78
    assert "Qwen/Qwen2.5-7B is not on this machine" in result.stderr


def test_a_model_folder_is_counted(tmp_path: Path) -> None:
    count = write_model(tmp_path / "model", ModelSize(hidden_size=64, num_heads=2), seed=0)
    result = call("plan", "local/debug", f"model.path={tmp_path / 'model'}", "model.device=cpu")
    assert (
        f"planned for {host_memory().total / GIB:.0f} GiB of a node's memory, by default this machine's"
        in result.stderr
    )
    output = result.output
    assert f"{count:,} parameters (safetensors headers)" in output


def test_a_plan_without_gpus_is_for_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["plan", "local/debug", "--size", "0.5B", "model.device=cpu"]
    monkeypatch.setattr(check, "host_memory", lambda: Memory(total=4 * GIB, available=GIB))
    small = call(*words)
    assert (small.exit_code, "planned for 4 GiB of a node's memory, by default this" in small.stderr) == (
        EXIT_CONFIG,
        True,
    )
    given = call(*words, "--host-memory-gib", "64")
    assert (given.exit_code, "planned for 64 GiB" in given.stderr, " of 64.0: fits" in given.stdout) == (0, True, True)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rewards.0.name=gone.py:f"], "rewards.0.name = gone.py:f: there is no "),
        (["rewards.0.name=my.py:g"], "my.py has no 'g'. It has: f"),
        (["rewards.0.name=my.py:f"], "cannot be called: missing a required argument: 'gold'"),
        (["data.held_out=0.01", "eval.every=1 steps"], "data.held_out = 0.01 holds nothing out"),
    ],
)
def test_a_plan_refuses_what_submit_refuses_of_rewards_and_prompts(words: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def f(prompts, completions, gold): ...")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    data = ["data.train.path=rows.jsonl", "data.eval=null", "eval.every=null", "rewards=[{name: correctness}]"]
    result = call("plan", "local/debug", "--size", "0.5B", *data, *words)
    assert (result.exit_code, says in result.stderr, result.stdout) == (EXIT_CONFIG, True, "")


def test_a_cache_that_launch_env_names_is_found(tmp_path: Path) -> None:
    snapshot = tmp_path / "site" / "hub" / "models--Qwen--Qwen2.5-7B" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    shape = FAMILY["7B"]
    values: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
    }
    (snapshot / "config.json").write_text(json.dumps(values))
    output = call("plan", CONFIG_7B, "launch.env.HF_HOME=$SITE_DIR", SITE_DIR=str(tmp_path / "site")).output
    assert "7,615,616,512 parameters (formula on config.json)" in output


def test_measured_steps_are_reported(tmp_path: Path) -> None:
    config = load_config(CONFIG_7B, [f"run.root={tmp_path}"])
    run = tmp_path / "grpo_7b_rlzero_general"
    (run / "attempts" / "1-77").mkdir(parents=True)
    (run / "config.yaml").write_text(to_yaml(config))
    record = {"attempt": 1, "job_id": "77", "source": "slurm", "nodes": ["a", "b"], "started_at": 0.0, "ends_at": None}
    (run / "attempts" / "1-77" / "attempt.json").write_text(json.dumps({**record, "supervisor_pid": 1}))
    steps = [{"step": step, "attempt": 1, "time": 0.0, "time/step_s": 36.0} for step in range(1, 8)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    output = call("plan", CONFIG_7B, f"run.root={tmp_path}", "--size", "7B").output
    assert "Step time: 36.0 s, the median of 7 steps of attempt 1 on 2 nodes." in output
    remaining = -(-1_000_000 // 1024) - 7
    assert f"Node-hours left: {remaining * 36 * 2 / 3600:.1f}, for {remaining} steps." in output


def test_env_shows_what_reaches_and_never_a_secret() -> None:
    environ = {"WANDB_API_KEY": SECRET, "MY_DB_PASSWORD": SECRET, "NCCL_DEBUG": "INFO", "WANDB_NOTES": f"key {SECRET}"}
    for words in ([], ["--json"], [CONFIG_7B], [CONFIG_7B, "--json"]):
        output = call("config", "--env", *words, **environ).output
        assert SECRET not in output
        assert "WANDB_API_KEY" in output
        assert "MY_DB_PASSWORD" in output
    text = call("config", "--env", **environ).output
    assert "  WANDB_API_KEY=********  # tracking, key included; passed on, never written\n" in text
    assert "  NCCL_DEBUG=INFO  # GPU collectives\n" in text
    assert "MY_DB_PASSWORD (secret)" in text


def test_env_takes_launch_settings_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(to_yaml(load_config(CONFIG_7B, ["launch.pass_env=[MINE]"])))
    listed = {
        entry["name"]: entry for entry in json.loads(call("config", "--env", "mine.yaml", "--json", MINE="1").output)
    }
    assert (listed["MINE"]["outcome"], listed["MINE"]["reason"]) == ("passed", "launch.pass_env")
    assert (listed["NCCL_SOCKET_IFNAME"]["outcome"], listed["NCCL_SOCKET_IFNAME"]["value"]) == ("set", "hsn")
    without = {entry["name"]: entry for entry in json.loads(call("config", "--env", "--json", MINE="1").output)}
    assert (without["MINE"]["outcome"], without["MINE"]["value"]) == ("dropped", None)


def test_env_and_plan_do_without_what_trains(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules.update(dict.fromkeys("
        "('torch', 'ray', 'vllm', 'transformers', 'numpy', 'deepspeed')))\n"  # an import of one of them fails
        "from click.testing import CliRunner\nfrom hpc_grpo.cli import check\n"
        "print(CliRunner().invoke(check.config, ['--env']).exit_code)\n"
        f"result = CliRunner().invoke(check.plan, [{CONFIG_7B!r}, '--size', '7B'])\n"
        "print(result.exit_code, result.stdout)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.startswith("0\n0 Qwen2.5-7B")
    assert "Recommended: this config's own, 60 s a step" in run.stdout
