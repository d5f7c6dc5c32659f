"""What a learner does not compute does not change a gradient: real DeepSpeed, each ZeRO stage, one rank and two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.algorithms.losses import KlSettings
from hpc_grpo.demo.model import write_model
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.types import Minibatch, TrainSequence
from tests.integration.learner_processes import make_config, make_groups, run_ranks
from tests.integration.learner_resume import STAGES
from tests.support.tiny_models import TINY

pytestmark = pytest.mark.integration

CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "all computed": (False, {"share_prompts": False}),
    "left out": (True, {"share_prompts": False}),
    "shared prompts": (False, {}),
    "shared prompts, groups cut": (False, {"max_tokens_per_microbatch": 40}),
    "shared prompts, one microbatch": (False, {"max_tokens_per_microbatch": 1000}),
    "both": (True, {}),
}
"""Whether sequences without a gradient are left out, and keys of `train`: each gives the gradient of the first."""
_NO_LR = 1e-30
"""Moves no weight, so that one learner can take every case."""


def make_step() -> list[TrainSequence]:
    """Three groups; the second has no variance, nor has the second half of the third, which rank 1 gets alone."""
    return [
        replace(each, advantages=0.0 * each.advantages) if 4 <= index < 8 or index >= 10 else each
        for index, each in enumerate(make_groups())
    ]


def gradients_of(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[tuple[int, str], Any]:
    """Each parameter's gradient in a step of three minibatches, and the metrics, by ZeRO stage and case.

    Nothing of the third has an advantage.
    """
    from hpc_grpo.learner.learner import Learner

    found: dict[tuple[int, str], Any] = {}
    sequences = make_step()
    share = sequences if world_size == 1 else sequences[10:] if rank == 1 else sequences[:10]
    num_tokens = sum(each.num_trained_tokens for each in sequences)
    still = tuple(replace(each, advantages=0.0 * each.advantages) for each in share)
    counts = num_tokens, len(sequences)
    minibatches = [Minibatch(own, *counts) for own in (tuple(share), tuple(share), still)]
    for stage in STAGES:
        config = make_config(model, root, zero_stage=stage, lr=_NO_LR)
        config = config.model_copy(update={"loss": config.loss.model_copy(update={"kl": KlSettings()})})
        learner = Learner(config, rank, world_size, store)
        store = None  # the group stands
        for name, (leaves_out, settings) in CASES.items():
            learner.train_by(config.model_copy(update={"train": config.train.model_copy(update=settings)}))
            learner.skips_zero_advantages = leaves_out
            found[stage, name] = _step(learner, minibatches)
    return found


def _step(learner: Any, minibatches: list[Minibatch]) -> tuple[list[dict[str, Any]], Any]:
    from deepspeed.utils import safe_get_full_grad

    gradients: list[dict[str, Any]] = []
    take_step = learner.ds_engine.step

    def step() -> None:
        parameters = learner.model.hf_named_parameters()
        gradients.append({name: safe_get_full_grad(each).double().numpy() for name, each in parameters})
        take_step()

    learner.ds_engine.step = step
    try:
        return gradients, learner.train_step(minibatches)
    finally:
        learner.ds_engine.step = take_step


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[tuple[int, str], Any]]]:
    root = tmp_path_factory.mktemp("savings")
    write_model(root / "model", TINY, seed=0)
    return {size: run_ranks(size, gradients_of, root / "model", root) for size in (1, 2)}


def distance(gradients: dict[str, Any], expected: dict[str, Any]) -> float:
    """The norm of the difference by the norm of what is expected, over all parameters."""
    off, whole = (
        sum(float(np.square(own).sum()) for own in each)
        for each in ([gradients[name] - expected[name] for name in expected], expected.values())
    )
    return float((off / whole) ** 0.5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", list(CASES)[1:])
def test_what_is_saved_does_not_change_the_gradient(found: Any, case: str, world_size: int, stage: int) -> None:
    [*expected, nothing], _ = found[1][0][1, "all computed"]
    assert not any(own.any() for own in nothing.values())
    for rank in found[world_size]:
        [*gradients, nothing], _ = rank[stage, case]
        assert not any(own.any() for own in nothing.values())
        for own, theirs in zip(gradients, expected, strict=True):
            assert distance(own, theirs) < 1e-6


@pytest.mark.parametrize("world_size", [1, 2])
def test_metrics_of_a_step_with_sequences_left_out_tell_their_share(found: Any, world_size: int) -> None:
    """Terms of the loss count them; means are those of the others, also where a rank has none."""
    whole = merge([rank[2, "all computed"][1] for rank in found[world_size]])
    saved = merge([rank[2, "left out"][1] for rank in found[world_size]])
    sequences = make_step()
    num_still = sum(each.num_trained_tokens for each in sequences if not each.advantages.any())
    num_tokens = sum(each.num_trained_tokens for each in sequences)
    assert saved.pop("tokens/left_out_fraction") == pytest.approx((2 * num_still + num_tokens) / (3 * num_tokens))
    assert set(saved) == set(whole)
    for name in ("loss/policy", "grad_norm", "lr", "skipped_optimizer_steps"):
        assert saved[name] == pytest.approx(whole[name], rel=1e-5)
    assert saved["policy/entropy"] == pytest.approx(whole["policy/entropy"], rel=0.05)
