"""Bad input gets one clear message and the right exit code, and never hangs.

Three places find mistakes: the command line before anything starts, the driver before Ray is used, and a whole run
when only a reward or the cluster can tell.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpc_grpo.config import load_resolved
from hpc_grpo.driver.inputs import load_inputs
from hpc_grpo.errors import EXIT_CONFIG, ConfigError
from hpc_grpo.run.paths import RunDir
from tests.integration.training_runs import Attempt, tiny_config, write_workspace
from tests.support.command import call

pytestmark = pytest.mark.integration

DEADLINE_S = 120.0

BROKEN_REWARDS = """
import time

def raises(prompts, completions, **fields):
    raise KeyError("gold answer")

def loops(prompts, completions, **fields):
    while True:
        time.sleep(0.01)

NOT_CALLABLE = 3
"""


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_workspace(tmp_path_factory.mktemp("bad"))
    (folder / "broken_rewards.py").write_text(BROKEN_REWARDS)
    (folder / "does_not_import.py").write_text("import a_module_nobody_has\n")
    (folder / "empty.jsonl").write_text("")
    good = json.dumps({"question": "What is 1+1?", "answer": "#### 2"}) + "\n"
    with (folder / "broken.jsonl").open("w") as file:
        while file.tell() < 1_000_000:
            file.write(good)
        file.write('{"question": "What is 1+1?", "answer"\n')
    write_larger_vocabulary(folder / "tied", folder / "larger_vocabulary")
    demonstrations = [{"question": "1+1?", "answer": "2" * count} for count in (3, 72)]
    (folder / "long_sft.jsonl").write_text("".join(json.dumps(each) + "\n" for each in demonstrations))
    return folder


def write_larger_vocabulary(model: Path, folder: Path) -> None:
    """A model whose tokenizer knows a token that it has no embedding for."""
    from transformers import AutoTokenizer

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<unheard-of>"])
    tokenizer.save_pretrained(folder)


def command(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def assert_one_clear_error(code: int, said: str, words: list[str]) -> None:
    assert code == EXIT_CONFIG, said
    assert said.count("error: ") == 1, said
    assert "Traceback" not in said, said
    for word in words:
        assert word in said, said


CLI_CASES = {
    "misspelt key": (["train.lrr=1"], ["train.lrr", "did you mean 'lr'"]),
    "flash attention on a CPU": (["train.attention=flash_attention_2"], ["train.attention", "sdpa"]),
}


@pytest.mark.parametrize("case", CLI_CASES)
def test_command_line_finds(case: str, mistakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mistakes)
    overrides, words = CLI_CASES[case]
    found = call("train", str(tiny_config(mistakes, "cli")), *overrides)
    assert_one_clear_error(found.exit_code, found.output, words)


def test_run_name_taken_by_another_config(mistakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mistakes)
    config = str(tiny_config(mistakes, "taken"))
    run = RunDir(mistakes / "runs" / "taken")
    run.create()
    run.ledger.write_text('{"step": 1, "attempt": 1, "ordinals": [0]}\n')
    run.config.write_text(call("config", config, "rollout.group_size=6", "--yaml").stdout)
    found = call("train", config)
    assert_one_clear_error(found.exit_code, found.output, ["taken", "rollout.group_size"])


DRIVER_CASES = {
    "missing model folder": ({"model": {"path": "no/such/model"}}, ["model.path", "no/such/model"]),
    "line broken after a million bytes": ({"data": {"train": {"path": "broken.jsonl"}}}, ["broken.jsonl", "line"]),
    "empty data set": ({"data": {"train": {"path": "empty.jsonl"}}}, ["empty.jsonl", "empty"]),
    "longer than the context": ({"rollout": {"max_new_tokens": 100}}, ["context", "64", "rollout.max_new_tokens"]),
    "demonstration longer than the context": (
        {"task": "sft", "data": {"train": {"path": "long_sft.jsonl"}}},
        ["Item 1 of long_sft.jsonl", "78 tokens", "the context of model.path", "64", "data.drop_long_prompts"],
    ),
    "reward that does not import": (
        {"rewards": [{"name": "does_not_import.py:reward"}], "eval": {"reward": "does_not_import.py:reward"}},
        ["does_not_import.py", "a_module_nobody_has"],
    ),
    "reward that is no function": (
        {"rewards": [{"name": "broken_rewards.py:NOT_CALLABLE"}]},
        ["NOT_CALLABLE"],
    ),
}


def driver_config(case: str, mistakes: Path) -> Path:
    """The resolved config of a run directory, as the command line would have frozen it."""
    sections, _ = DRIVER_CASES[case]
    values = yaml.safe_load(tiny_config(mistakes, "driver").read_text())
    for section, changes in sections.items():
        values[section] = {**values[section], **changes} if isinstance(changes, dict) else changes
    if values.get("task") == "sft":
        del values["rollout"]
    values["train"]["max_tokens_per_microbatch"] = 1024
    run = RunDir(mistakes / "runs" / f"driver-{case.replace(' ', '-')}")
    run.create()
    run.config.write_text(yaml.safe_dump(values))
    return run.config


@pytest.mark.parametrize("case", DRIVER_CASES)
def test_inputs_are_checked_without_ray(case: str, mistakes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(mistakes)
    config = load_resolved(driver_config(case, mistakes))
    with pytest.raises(ConfigError) as raised:
        load_inputs(config)
    for word in DRIVER_CASES[case][1]:
        assert word in str(raised.value)


def test_the_driver_ends_with_the_error_before_it_needs_ray(mistakes: Path) -> None:
    config = driver_config("line broken after a million bytes", mistakes)
    finished = command(["hpc_grpo.driver.main", str(config.parent)], mistakes)
    assert_one_clear_error(finished.returncode, finished.stdout + finished.stderr, ["broken.jsonl", "line"])


CLUSTER_CASES = {
    "reward that raises": ({"rewards": "raises"}, ["raises", "gold answer", "grading.max_failed_fraction"]),
    "engines that do not fit": ({"engine": {"engines_per_node": 500}}, ["engine.engines_per_node", "500", "CPU"]),
    "token that the model lacks": (
        {"model": "larger_vocabulary", "data": {"prompt_format": "<unheard-of>{prompt}"}},
        ["refuses the prompt of ordinal", "outside the model's vocabulary"],
    ),
}


def run_config(mistakes: Path, name: str, sections: dict[str, Any]) -> Path:
    if "rewards" in sections:
        reward = f"{mistakes / 'broken_rewards.py'}:{sections['rewards']}"
        sections = {"rewards": [{"name": reward, "timeout_s": 1.0}]}
    return tiny_config(mistakes, name.replace(" ", "-"), **sections)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if "fit" in case else [pytest.mark.long]) for case in CLUSTER_CASES]
)
def test_driver_ends_with_the_reason(case: str, mistakes: Path, cluster: dict[str, str]) -> None:
    sections, words = CLUSTER_CASES[case]
    with Attempt.in_cluster(cluster, run_config(mistakes, case, sections)) as attempt:
        code = attempt.wait(DEADLINE_S)
    assert_one_clear_error(code, attempt.text, words)
    assert "starting another" not in attempt.text


@pytest.mark.long
def test_run_ends_with_the_reason_where_a_reward_loops_forever(mistakes: Path) -> None:
    config = run_config(mistakes, "loops", {"rewards": "loops"})
    finished = command(["hpc_grpo.cli", "train", str(config)], mistakes)
    said = finished.stdout + finished.stderr
    assert_one_clear_error(finished.returncode, said, ["loops", "grading.max_failed_fraction"])
