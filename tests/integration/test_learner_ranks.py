"""Real DeepSpeed in real processes: the split into ranks, ZeRO stages and microbatches changes nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hpc_grpo.demo.model import write_model
from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.plan.disk import checkpoint_bytes
from hpc_grpo.run.checkpoint import valid_checkpoints
from hpc_grpo.run.paths import RunDir
from hpc_grpo.types import Minibatch
from tests.integration.learner_processes import (
    make_config,
    make_sequences,
    make_step,
    run_ranks,
    save_together,
    weights_of,
)
from tests.integration.learner_resume import STAGES, resume, resume_from
from tests.integration.naive_grpo import naive_training
from tests.support.tiny_models import TINY

pytestmark = pytest.mark.integration

NUM_STEPS = 5


def train_all_stages(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[int, Any]:
    """Five steps under each ZeRO stage, the last of two minibatches; then, where asked, save and go on."""
    from hpc_grpo.learner.learner import Learner

    results = {}
    for stage in STAGES:
        config = make_config(model, root, zero_stage=stage)
        learner = Learner(config, rank, world_size, store)
        metrics = [learner.train_step(make_step(seed, rank, world_size)) for seed in range(NUM_STEPS - 1)]
        metrics.append(learner.train_step(make_step(NUM_STEPS, rank, world_size, num_minibatches=2)))
        weights = weights_of(learner)
        results[stage] = {"metrics": metrics, "weights": weights}
        results[stage]["resumed"] = resume(learner, config, rank, world_size, root)
        results[stage]["idle"] = idle_step(learner)
        if world_size == 1:
            results[stage]["complaints"] = broken_steps(learner)
        connections = psutil.Process().net_connections()
        results[stage]["listening_on"] = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    return results


def idle_step(learner: Any) -> Any:
    """Weights before and after a step of two minibatches that have nothing to train on, its metrics and versions."""
    before, version = weights_of(learner), learner.policy_version
    measured = make_sequences(5, 1) if learner.rank == 0 else []
    metrics = learner.train_step([Minibatch((), 0, 0)] * 2, measured)
    return before, weights_of(learner), merge([metrics]), learner.policy_version - version


def broken_steps(learner: Any) -> list[str]:
    """What a learner says to a sequence beyond its context, and to an advantage that is not a number."""
    minibatch = make_step(1, 0, 1)[0]
    first, *others = minibatch.sequences
    long = replace(first, token_ids=np.full(65, 3, np.int32))
    broken = replace(first, advantages=first.advantages * np.float32("nan"))
    messages = []
    for sequence in (long, broken):
        with pytest.raises(HpcGrpoError) as caught:
            learner.train_step([replace(minibatch, sequences=(sequence, *others))])
        messages.append(str(caught.value))
    return messages


def resume_from_two(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[int, Any]:
    from hpc_grpo.learner.learner import Learner

    results = {}
    for stage in STAGES:
        config = make_config(model, root, zero_stage=stage)
        if stage == STAGES[0]:
            Learner(config, rank, world_size, store)  # joins the group
        results[stage] = resume_from(RunDir(root / "2_ranks" / f"stage_{stage}"), config, rank, world_size)
    return results


def save_untrained(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[str, Any]:
    """Save under ZeRO-3 before the first step, and take two steps."""
    from hpc_grpo.learner.learner import Learner

    learner = Learner(make_config(model, root, zero_stage=3), rank, world_size, store)
    save_together(learner, RunDir(root / "untrained").checkpoint(0), {})()
    for seed in (7, 8):
        learner.train_step(make_step(seed, rank, world_size))
    return weights_of(learner)


def resume_untrained(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[str, Any]:
    from hpc_grpo.learner.learner import Learner

    config = make_config(model, root, zero_stage=3)
    Learner(config, rank, world_size, store)  # joins the group
    return resume_from(RunDir(root / "untrained"), config, rank, world_size)["weights"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("learner")
    write_model(root / "model", TINY, seed=0)
    return root


@pytest.fixture(scope="module")
def alone(workspace: Path) -> dict[int, Any]:
    return run_ranks(1, train_all_stages, workspace / "model", workspace)[0]


@pytest.fixture(scope="module")
def together(workspace: Path, alone: dict[int, Any]) -> list[dict[int, Any]]:
    return run_ranks(2, train_all_stages, workspace / "model", workspace)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_train_like_one(stage: int, alone: Any, together: Any) -> None:
    reference = alone[1]
    for result in (alone[stage], together[0][stage], together[1][stage]):
        for name, expected in reference["weights"].items():
            np.testing.assert_allclose(result["weights"][name], expected, rtol=1e-5, atol=2e-6, err_msg=name)
    for step in range(NUM_STEPS):
        expected = merge([reference["metrics"][step]])
        merged = merge([rank[stage]["metrics"][step] for rank in together])
        # grad_norm is the same number on every rank; everything else is reduced over tokens.
        assert merged == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_one_rank_trains_like_a_naive_loop(alone: Any, workspace: Path) -> None:
    config = make_config(workspace / "model", workspace)
    steps = [[list(m.sequences) for m in make_step(seed, 0, 1)] for seed in range(NUM_STEPS - 1)]
    steps.append([list(m.sequences) for m in make_step(NUM_STEPS, 0, 1, num_minibatches=2)])
    weights, grad_norms = naive_training(config, steps)
    for name, expected in weights.items():
        np.testing.assert_allclose(alone[1]["weights"][name], expected, rtol=1e-5, atol=2e-6, err_msg=name)
    reported = [merge([metrics])["grad_norm"] for metrics in alone[1]["metrics"]]
    assert reported == pytest.approx(grad_norms, rel=1e-4)


def test_weights_moved(alone: Any, workspace: Path) -> None:
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.float32)
    after = alone[1]["weights"]
    assert list(after) == [name for name, _ in before.named_parameters()]
    moved = [np.abs(after[name] - tensor.detach().numpy()).max() for name, tensor in before.named_parameters()]
    assert max(moved) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_nothing_to_train_on_counts_and_moves_no_weight(stage: int, alone: Any, together: Any) -> None:
    """Adam has its moments from the steps before."""
    for result in (alone, *together):
        before, after, metrics, num_versions = result[stage]["idle"]
        for name, array in before.items():
            np.testing.assert_array_equal(after[name], array, err_msg=name)
        assert (metrics["skipped_optimizer_steps"], metrics["grad_norm"], num_versions) == (2.0, 0.0, 2)
    measured = [result[stage]["idle"][2].get("mismatch/logprob_abs_diff_mean") for result in (alone, *together)]
    assert measured[1] == pytest.approx(measured[0], rel=1e-3), "on the rank that was given a sequence"
    assert set(measured[2:]) == {None}


@pytest.mark.parametrize("stage", STAGES)
def test_broken_input_is_reported_in_words(stage: int, alone: Any) -> None:
    too_long, not_finite = alone[stage]["complaints"]
    assert "A sequence has 65 tokens" in too_long
    assert "is not finite" in not_finite


def test_nothing_listens_beyond_loopback(alone: Any, together: Any) -> None:
    for result in (alone, *together):
        assert all(result[stage]["listening_on"] == {"127.0.0.1"} for stage in STAGES)


@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_bit_identical(stage: int, alone: Any, together: Any) -> None:
    for result in (alone[stage], together[0][stage], together[1][stage]):
        resumed = result["resumed"]
        (straight, expected), (again, weights) = resumed["straight"], resumed["again"]
        assert straight == again
        for name, array in expected.items():
            np.testing.assert_array_equal(weights[name], array, err_msg=name)
        first, forked = merge([straight[0]]), merge([resumed["forked"]])
        assert (forked["lr"], forked["grad_norm"]) == (2 * first["lr"], first["grad_norm"])
        assert resumed["clip"] == 0.125
        assert resumed["driver_state"] == {"step": 5, "next_ordinal": 20}
        assert resumed["version"] == NUM_STEPS + 1


@pytest.fixture(scope="module")
def from_two(workspace: Path, together: Any) -> dict[int, Any]:
    return run_ranks(1, resume_from_two, workspace / "model", workspace)[0]


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_resumes_with_another_number_of_ranks(
    stage: int, alone: Any, together: Any, from_two: Any, workspace: Path
) -> None:
    """Weights, optimizer moments and schedule: two more steps end where those of the ranks that wrote it do."""
    metrics, expected = alone[stage]["resumed"]["straight"]
    for resumed in (together[0][stage]["resumed"]["resharded"], from_two[stage]):
        for name, array in expected.items():
            np.testing.assert_allclose(resumed["weights"][name], array, rtol=1e-5, atol=4e-6, err_msg=name)
        assert resumed["lr"] == [step["lr"] for step in metrics]
        assert resumed["driver_state"] == {"step": 5, "next_ordinal": 20}
        assert resumed["version"] == NUM_STEPS + 3
    for num_ranks in (1, 2):
        assert not list((workspace / f"{num_ranks}_ranks" / f"stage_{stage}" / "checkpoints").glob(".*"))


def test_a_zero_3_checkpoint_before_the_first_step_resumes_with_another_number_of_ranks(workspace: Path) -> None:
    expected = run_ranks(2, save_untrained, workspace / "model", workspace)[0]
    (resumed,) = run_ranks(1, resume_untrained, workspace / "model", workspace)
    for name, array in expected.items():
        np.testing.assert_allclose(resumed[name], array, rtol=1e-5, atol=4e-6, err_msg=name)


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoint_is_valid_and_tampering_is_noticed(stage: int, together: Any, workspace: Path) -> None:
    run_dir = RunDir(workspace / "2_ranks" / f"stage_{stage}")
    found = next(valid_checkpoints(run_dir), None)
    assert found is not None
    assert (found.step, found.manifest.world_size, found.manifest.zero_stage) == (5, 2, stage)
    assert found.manifest.policy_version == NUM_STEPS + 1
    assert not list(run_dir.checkpoints.glob(".*"))
    largest = max(found.manifest.files, key=lambda entry: entry.size)
    with (found.path / largest.name).open("r+b") as file:
        file.seek(largest.size // 2)
        byte = file.read(1)
        file.seek(largest.size // 2)
        file.write(bytes([byte[0] ^ 1]))
    assert next(valid_checkpoints(run_dir), None) is None


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_takes_the_disk_that_plan_reckons(stage: int, together: Any, workspace: Path) -> None:
    config = make_config(workspace / "model", workspace, zero_stage=stage)
    num_parameters = sum(weights.size for weights in together[0][stage]["weights"].values())
    run_dir = RunDir(workspace / "2_ranks" / f"stage_{stage}")
    checkpoint = next(valid_checkpoints(run_dir, check_hashes=False))  # another test may have flipped a bit
    num_bytes = sum(entry.size for entry in checkpoint.manifest.files)
    assert 0 < num_bytes - checkpoint_bytes(config, num_parameters) < 2 * num_parameters  # names and generators


@pytest.mark.parametrize("stage", STAGES)
def test_export_loads_and_equals_the_weights(stage: int, together: Any, workspace: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = workspace / "2_ranks" / f"stage_{stage}" / "export" / "step_5"
    model = AutoModelForCausalLM.from_pretrained(folder)
    weights = together[0][stage]["weights"]
    exported = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    assert list(exported) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(exported[name], array, err_msg=name)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "sdpa"
    original = AutoTokenizer.from_pretrained(workspace / "model")
    text = "3 + 4 = 7"
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == original(text)["input_ids"]
