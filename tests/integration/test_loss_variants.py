"""Losses in real learners: three ranks, of which one may have nothing, take the steps that one takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.types import Minibatch
from tests.integration.learner_processes import make_config, make_sequences, run_ranks, weights_of
from tests.support.configs import loss_of

pytestmark = pytest.mark.integration

VARIANTS: dict[str, dict[str, Any]] = {
    "gspo, sequences": {"name": "gspo", "clip_low": 0.01, "clip_high": 0.01, "correction": "sequence"},
    "dr_grpo, m2po": {"name": "dr_grpo", "correction": {"name": "m2po", "args": {"cap": 0.05}}},
    "kl_cov, entropy": {
        "name": "kl_cov",
        "args": {"fraction": 0.1},
        "entropy_coef": 0.01,
        "kl": {"estimator": "unbiased"},
    },
    "clip_cov": {"name": "clip_cov", "args": {"fraction": 0.1, "low": -0.5}, "kl": {"coef": 0.0}},
    "to the engine": {"proximal": "engine", "correction": "none"},
    "masked sequences": {"correction": {"name": "sequence_mask", "args": {"low": 0.5, "cap": 2.0}}},
    "decoupled, interpolated": {"name": "decoupled_ppo", "proximal": "interpolated", "kl": {"where": "reward"}},
}


def train_variants(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[str, Any]:
    """Two steps of two minibatches with each variant; of the first one's shares, one rank's is empty."""
    from hpc_grpo.learner.learner import Learner

    results = {}
    for name, changes in VARIANTS.items():
        loss = loss_of(**{**changes, "kl": {"coef": 0.1, **changes.get("kl", {})}})
        config = make_config(model, root).model_copy(update={"loss": loss})
        learner = Learner(config, rank, world_size, store)
        steps = [[share(2 * step + index, rank, world_size, step) for index in range(2)] for step in range(2)]
        metrics = [learner.train_step(minibatches) for minibatches in steps]
        results[name] = (metrics, weights_of(learner))
    return results


def share(seed: int, rank: int, world_size: int, step: int) -> Minibatch:
    """This rank's part of a minibatch, whose tokens older weights sampled the more the later the step."""
    sequences = make_sequences(seed, 6)
    versions = [np.where(own.loss_mask, step, 0).astype(np.int32) for own in sequences]
    sequences = [replace(own, policy_versions=v) for own, v in zip(sequences, versions, strict=True)]
    cuts = (0, 4, 6, 6) if step == 0 else (0, 1, 3, 6)
    own = sequences if world_size == 1 else sequences[cuts[rank] : cuts[rank + 1]]
    return Minibatch(tuple(own), sum(each.num_trained_tokens for each in sequences), len(sequences))


def test_three_ranks_take_the_steps_of_one_with_every_kind_of_loss(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, ModelSize(64, 2, 2, 1, 64, 64), seed=0)
    (one,), three = (run_ranks(n, train_variants, model, tmp_path / f"runs_{n}") for n in (1, 3))
    for name in VARIANTS:
        metrics, weights = one[name]
        for step, expected in enumerate(metrics):
            merged = merge([ranks[name][0][step] for ranks in three])
            assert merged == pytest.approx(merge([expected]), rel=2e-4, abs=2e-5), (name, step)
        for ranks in three:
            for parameter, value in ranks[name][1].items():
                np.testing.assert_allclose(
                    value, weights[parameter], rtol=1e-4, atol=2e-5, err_msg=f"{name} {parameter}"
                )
