"""What a finished run leaves: a model that transformers loads, and evals of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_grpo.launch.freeze import freeze
from hpc_grpo.run.evals import ANSWER, RESULT, EvalRequest, completions_file, eval_config, new_eval_dir
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.frozen_config import read_config
from hpc_grpo.run.paths import RunDir, step_dirs
from hpc_grpo.run.progress import read_metrics
from tests.integration.conftest import SFT_STEPS, SYNC_STEPS
from tests.integration.training_runs import RUN_DEADLINE_S, metrics_of

pytestmark = pytest.mark.integration


def greedy(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> list[int]:
    """Token by token, without a cache."""
    tokens = tokenizer(prompt)["input_ids"]
    start = len(tokens)
    with torch.no_grad():
        while len(tokens) < start + max_new_tokens and tokenizer.eos_token_id not in tokens[start:]:
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[start:]


def test_transformers_decodes_what_the_engines_decoded(sync_run: RunDir) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(sync_run.export(SYNC_STEPS), dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(sync_run.export(SYNC_STEPS))
    lines = list(read_jsonl(sync_run.eval_rollouts(SYNC_STEPS)))
    assert len(lines) == 8
    num_compared = 0
    for line in lines:
        tokens = greedy(model, tokenizer, line["prompt"], max_new_tokens=24)
        # One token a byte: equal text is equal tokens, but for the end token.
        assert line["completion"].isascii()
        assert tokenizer(line["completion"])["input_ids"] == [t for t in tokens if t != tokenizer.eos_token_id]
        num_compared += len(line["completion"])
    assert num_compared > 8 * 4, "the completions are too short to show anything"


def test_sync_run_is_on_policy(sync_run: RunDir) -> None:
    assert all(values["lag/max"] == 0 for values in metrics_of(sync_run).values())


def test_eval_reports_pass_at_k(untied_run: RunDir) -> None:
    metrics = read_metrics(untied_run.metrics)
    assert [step for step, values in metrics.items() if "eval/pass@1" in values] == [0, 4, 8]
    for step in (0, 4, 8):
        lines = list(read_jsonl(untied_run.eval_rollouts(step)))
        solved = [[line["solved"] for line in lines if line["ordinal"] == ordinal] for ordinal in range(8)]
        assert all(len(samples) == 3 for samples in solved)
        values = metrics[step]
        assert values["eval/pass@1"] == pytest.approx(sum(map(sum, solved)) / 24)
        # Of three samples, two fail to hold a solved one only when two or three are unsolved.
        unsolved_pairs = [{0: 3, 1: 1}.get(sum(samples), 0) / 3 for samples in solved]
        assert values["eval/pass@2"] == pytest.approx(1 - sum(unsolved_pairs) / 8)
        assert values["eval/reward_mean"] == pytest.approx(sum(line["reward"] for line in lines) / 24)


def test_an_eval_apart_from_training_says_what_the_last_one_in_training_said(
    untied_run: RunDir, cluster: dict[str, str], tmp_path: Path
) -> None:
    """An engine that reads the export samples as one that the learner published to, prompt by prompt."""
    folder, export = new_eval_dir(tmp_path), str(untied_run.export(8))
    freeze(eval_config(read_config(untied_run), folder, export), [], [])
    EvalRequest({"step_8": export}).save(folder)
    environment = {**cluster, "HPC_GRPO_ATTEMPT_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "hpc_grpo.driver.evaluation", str(folder.path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    apart = json.loads((folder.path / RESULT).read_text())["models"]["step_8"]["metrics"]
    within = {name: value for name, value in read_metrics(untied_run.metrics)[8].items() if name.startswith("eval/")}
    assert apart == within
    assert list(read_jsonl(completions_file(folder, "step_8"))) == list(read_jsonl(untied_run.eval_rollouts(8)))
    assert f"{apart['eval/pass@3']:.3f} [" in (folder.path / ANSWER).read_text()


def test_a_step_trained_again_gives_the_metrics_of_the_run_to_the_last_bit(untied_run: RunDir) -> None:
    """From the checkpoint of step 6: step 7 on the way, two optimizer steps each."""
    command = [sys.executable, "-m", "hpc_grpo.cli", "model", "replay", str(untied_run.path), "--step", "8", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout[done.stdout.index("{") :])
    assert result["first_step"] == 6
    assert result["replayed"] == result["recorded"]
    assert {"loss/policy", "grad_norm", "lr", "policy/entropy"} < result["recorded"].keys()
    assert sorted(step_dirs(untied_run.batches(0).parent)) == [7, 8]


def test_training_learns_what_is_rewarded(untied_run: RunDir) -> None:
    rewards = [values["reward/mean"] for values in metrics_of(untied_run).values()]
    assert rewards[-1] > rewards[0] + 0.05


def test_sft_lowers_the_loss(sft_run: RunDir) -> None:
    losses = [values["loss/policy"] for values in metrics_of(sft_run).values()]
    assert len(losses) == SFT_STEPS
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    state = json.loads(sft_run.state.read_text())
    assert (state["step"], state["total_steps"]) == (SFT_STEPS, SFT_STEPS)
