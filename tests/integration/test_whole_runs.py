"""Whole runs on CPU that no other test trains to COMPLETE: PPO and distillation, each at a placement of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.learner.record import read_batches
from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.files import read_jsonl
from hpc_grpo.run.ledger import check_ledger
from hpc_grpo.run.paths import RunDir
from hpc_grpo.run.progress import read_state
from tests.integration.mismatch import TOLERANCE
from tests.integration.training_runs import HERE, complete_in_cluster, metrics_of, tiny_config
from tests.support.tiny_models import write_family

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("name", "sections", "metric", "least", "most"),
    [
        ("ppo", {"placement": {"learners_per_node": 2}, "engine": {"engines_per_node": 2}}, "reward/mean", 1.4, 9),
        ("distill", {"rollout": {"stop": ["e", "qq"]}, "engine": {"tensor_parallel": 2}}, "kl/learner_teacher", 0, 0.8),
    ],
    ids=["PPO with two learners and two engines", "distillation with an engine of two processes"],
)
def test_a_run_trains_and_its_engines_follow(
    workspace: Path,
    cluster: dict[str, str],
    name: str,
    sections: Mapping[str, Any],
    metric: str,
    least: float,
    most: float,
) -> None:
    """`metric` of the last step, as a multiple of the first step's, lies between `least` and `most`.

    A text of rollout.stop ends a completion, whose last tokens engine and learner score alike.
    """
    args = {"critic_lr": 1e-2} if name == "ppo" else {"teacher": str(workspace / "untied")}
    task = {"name": name, "args": args}
    train = {"total_steps": 6, "zero_stage": 3}
    run = complete_in_cluster(cluster, tiny_config(workspace, name, **sections, task=task, train=train))
    metrics = metrics_of(run)
    assert list(metrics) == list(range(1, 7))
    assert max(values["mismatch/logprob_abs_diff_max"] for values in metrics.values()) < TOLERANCE
    assert least < metrics[6][metric] / metrics[1][metric] < most
    assert check_ledger(run).is_sound
    assert next(valid_checkpoints(run)).manifest.world_size == sections.get("placement", {}).get("learners_per_node", 1)
    if stop := sections.get("rollout"):
        texts = [line["completion"] for path in run.path.glob("rollouts/step_*.jsonl") for line in read_jsonl(path)]
        assert {text.find(stop["stop"][0]) for text in texts} > {-1}
        assert all(text.find("e") in (-1, len(text) - 1) for text in texts)


@pytest.fixture(scope="module")
def shared_rows(workspace: Path, cluster: dict[str, str]) -> RunDir:
    """Two learners share each row, in a run that a callback ends early."""
    write_model(workspace / "even", ModelSize(64, 2, 2, 2, 96, 64), seed=0)
    callback = {"name": f"{EXAMPLES}/early_stopping.py:no_gain", "args": {"patience": 2}}
    sections = {
        "train": {"total_steps": 4, "sequence_parallel": 2, "on_step": callback},
        "placement": {"learners_per_node": 2},
        "checkpoint": {"keep_batches": 2},
        "eval": {"every": 1, "solved_at": 2.0},
    }
    return complete_in_cluster(cluster, tiny_config(workspace, "shared_rows", "even", **sections))


def test_two_learners_share_each_row(shared_rows: RunDir) -> None:
    """Their logprobs are the engine's, and the step's record has each sequence once."""
    run, metrics = shared_rows, metrics_of(shared_rows)
    assert list(metrics) == [1, 2]
    assert max(values["mismatch/logprob_abs_diff_max"] for values in metrics.values()) < TOLERANCE
    assert all(values["grad_norm"] > 0.0 for values in metrics.values())
    assert [path.name for path in run.batches(2).iterdir()] == ["rank_0.npz"]
    minibatches, num_shares = read_batches(run.batches(2))
    assert num_shares == 1
    assert all(each.sequences for each in minibatches)


def test_learners_replay_the_experts_of_the_engine_in_every_turn(workspace: Path, cluster: dict[str, str]) -> None:
    """A turn's last token has its experts from the next turn. Gradient checkpointing computes each layer again."""
    tied = json.loads((workspace / "tied" / "config.json").read_text())
    tokens = {name: tied[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    write_family(workspace / "mixture", "mixtral", **tokens)
    AutoTokenizer.from_pretrained(workspace / "tied").save_pretrained(workspace / "mixture")
    sections: dict[str, Any] = {
        "environment": {"name": f"{HERE / 'letters_environment.py'}:Letters", "max_turns": 2, "max_tokens": 40},
        "rewards": [],
        "eval": {"every": None},
        "rollout": {"max_new_tokens": 8, "prompts_per_step": 3},
        "train": {"total_steps": 2, "router_replay": True, "gradient_checkpointing": True},
        "checkpoint": {"keep_batches": 1},
    }
    run = complete_in_cluster(cluster, tiny_config(workspace, "replay", "mixture", **sections))
    metrics = metrics_of(run)
    assert list(metrics) == [1, 2]
    assert max(values["mismatch/logprob_abs_diff_max"] for values in metrics.values()) < TOLERANCE
    assert all(values["grad_norm"] > 0.0 for values in metrics.values())
    sequences = [own for minibatch in read_batches(run.batches(2))[0] for own in minibatch.sequences]
    assert {own.experts.shape for own in sequences} == {(len(own.token_ids), 2, 2) for own in sequences}
    assert {own.experts.dtype for own in sequences} == {np.dtype(np.uint8)}


def test_a_callback_ends_a_run_as_complete(shared_rows: RunDir) -> None:
    run = shared_rows
    says = "eval/pass@1 has not risen above 0.000 in 2 evals."
    assert list(metrics_of(run)) == [1, 2]
    assert run.export(2).is_dir()
    assert next(valid_checkpoints(run)).step == 2
    assert run.complete_marker.read_text() == f"step 2\n{says}\n"
    state = read_state(run)
    assert state is not None
    assert (state.phase, state.step, state.total_steps, state.on_step) == ("complete", 2, 4, says)


@pytest.mark.long
def test_a_callback_that_fails_is_off_and_the_run_completes(workspace: Path, cluster: dict[str, str]) -> None:
    file = workspace / "failing.py"
    file.write_text("def fail(step, metrics, evals):\n    raise ValueError('no such metric')\n")
    sections = {
        "task": {"name": "sft", "args": {"batch_size": 16}},
        "data": {"train": {"path": str(workspace / "sft.jsonl")}, "eval": None},
        "train": {"total_steps": 3, "on_step": {"name": f"{file}:fail"}},
        "eval": {"every": None},
    }
    run = complete_in_cluster(cluster, tiny_config(workspace, "callback-fails", **sections))
    assert list(metrics_of(run)) == [1, 2, 3]
    assert run.complete_marker.read_text() == "step 3\n"
    state = read_state(run)
    assert state is not None
    assert state.on_step == (
        f"train.on_step.name = {file}:fail raised ValueError: no such metric ({file}:2) after step 1, and is off until "
        "the run starts again."
    )
