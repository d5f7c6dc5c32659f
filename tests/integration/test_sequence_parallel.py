"""Learners that share rows by `train.sequence_parallel` give the losses and gradients of one learner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpc_grpo.config import Config
from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.metrics.reductions import merge
from hpc_grpo.types import Minibatch, TrainSequence
from tests.integration.learner_processes import (
    VOCABULARY,
    make_config,
    make_groups,
    run_ranks,
    save_together,
    weights_of,
)
from tests.support.configs import loss_of
from tests.support.sequences import ordinary_sequence, with_experts
from tests.support.tiny_models import write_family

pytestmark = pytest.mark.integration

_NO_LR = 1e-30
"""Moves no weight, so that one learner can take every loss."""
_FLAT = {"proximal": "engine", "correction": "none"}
"""Ratios are to the engine's policy: far from 1, and some clipped."""
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        name: {"name": name, **_FLAT}
        for name in ("grpo", "bnpo", "dapo", "dr_grpo", "decoupled_ppo", "gspo", "gspo_token", "cispo", "sapo")
    },
    "kl_cov": {"name": "kl_cov", "args": {"fraction": 0.1}},
    "clip_cov": {"name": "clip_cov", "args": {"fraction": 0.1, "low": -0.5}},
    "truncated": {"correction": {"name": "truncated", "args": {"cap": 1.2}}},
    "sequence": {"correction": "sequence"},
    "sequence_mask": {"correction": {"name": "sequence_mask", "args": {"low": 1e-3, "cap": 1e3}}},
    "geometric": {"correction": {"name": "geometric", "args": {"low": 0.5, "cap": 2.0}}},
    "m2po": {"correction": {"name": "m2po", "args": {"cap": 0.05}}},
    "entropy": {"entropy_coef": 0.01},
    "interpolated": {"proximal": "interpolated"},
    "kl in the reward": {"kl": {"where": "reward"}},
    "unbiased kl": {"kl": {"estimator": "unbiased"}},
}
TASKS: dict[str, tuple[int, dict[str, Any]]] = {
    "ppo": (3, {"task": {"name": "ppo", "args": {"critic_lr": _NO_LR}}}),
    "distill": (2, {"task": {"name": "distill", "args": {"teacher": "ROOT/teacher"}}}),
    "sft": (2, {"task": "sft", "loss": None, "rollout": None}),
    "lora": (3, {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}),
    "experts": (3, {"model": {"path": "ROOT/experts"}, "train": {"router_aux_loss_coef": 0.3}}),
    "replayed experts": (2, {"model": {"path": "ROOT/experts"}, "train": {"router_replay": True}}),
}
"""ZeRO stage, and changes of the config; None removes a section."""
STAGES = (("float32", 1), ("float32", 2), ("float32", 3), ("bfloat16", 2), ("bfloat16", 3))


def make_step() -> list[Minibatch]:
    """Two minibatches of groups whose sequences begin alike, sampled by two versions of the weights."""
    made = [
        replace(each, policy_versions=np.where(each.loss_mask, index % 2, 0).astype(np.int32))
        for index, each in enumerate(make_groups())
    ]
    return [minibatch_of(made[:8]), minibatch_of(made[8:])]


def minibatch_of(sequences: list[TrainSequence]) -> Minibatch:
    return Minibatch(tuple(sequences), sum(each.num_trained_tokens for each in sequences), len(sequences))


def gradients_of(learner: Any, step: list[Minibatch]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Return the gradients of each optimizer step of the policy and of other trained models, and the metrics."""
    from deepspeed.utils import safe_get_full_grad

    gradients: dict[Any, Any] = {}
    engines = [learner.ds_engine, *(own for part in learner.parts for own in part.ds_engines)]
    begun = [engine.global_steps for engine in engines]
    takers = [engine.step for engine in engines]

    def take(index: int) -> None:
        number = engines[index].global_steps - begun[index]
        for name, own in engines[index].module.named_parameters():
            if own.requires_grad:
                gradients[index, number, name] = safe_get_full_grad(own).double().numpy()
        takers[index]()

    for index, engine in enumerate(engines):
        engine.step = lambda index=index: take(index)
    metrics = learner.train_step(step, step[0].sequences[:3])
    for engine, taker in zip(engines, takers, strict=True):
        engine.step = taker
    return gradients, metrics


class Learners:
    """Builds one learner after the other in this process, all learners sharing their rows by default."""

    def __init__(self, rank: int, world_size: int, store: Any, root: Path) -> None:
        self.rank, self.world_size, self._store, self._root = rank, world_size, store, root

    def build(self, changes: dict[str, Any], model: str = "model", **train: Any) -> tuple[Config, Any]:
        from hpc_grpo.learner.learner import Learner

        train = {"lr": _NO_LR, "adamw": {"eps": 1e-4}, "sequence_parallel": self.world_size, **train}
        values = make_config(self._root / model, self._root, **train).model_dump(mode="json", exclude_unset=True)
        values["launch"] = {"num_nodes": self.world_size}
        for name, own in changes.items():
            values[name] = {**values[name], **own} if isinstance(own, dict) and name in values else own
        config = Config.model_validate({name: own for name, own in values.items() if own is not None})
        learner = Learner(config, self.rank, self.world_size, self._store)
        self._store = None  # the group stands
        return config, learner


def train_all(rank: int, world_size: int, store: Any, root: Path) -> dict[Any, Any]:
    """Return gradients and metrics of each case, packed and with shared prompts."""
    learners, found, step = Learners(rank, world_size, store, root), {}, make_step()
    for dtype, stage in STAGES:
        config, learner = learners.build({"model": {"dtype": dtype}}, zero_stage=stage)
        for shares in (False, True):
            train = config.train.model_copy(update={"share_prompts": shares})
            learner.train_by(config.model_copy(update={"train": train}))
            found[f"{dtype}, ZeRO-{stage}", shares] = gradients_of(learner, step)
    kl = {"coef": 0.02, "reference": str(root / "teacher")}
    config, learner = learners.build({"loss": {"entropy_coef": 0.01, "kl": kl}}, max_tokens_per_microbatch=128)
    for name, changes in VARIANTS.items():
        loss = loss_of(**{**changes, "kl": {**kl, **changes.get("kl", {})}})
        for shares in (False, True):
            train = config.train.model_copy(update={"share_prompts": shares})
            learner.train_by(config.model_copy(update={"loss": loss, "train": train}))
            found[name, shares] = gradients_of(learner, step)
    for name, (stage, changes) in TASKS.items():
        changes = json.loads(json.dumps(changes).replace("ROOT", str(root)))
        config, learner = learners.build(changes, zero_stage=stage)
        replayed = [replace(own, sequences=tuple(with_experts(own.sequences))) for own in step]
        found[name, True] = gradients_of(learner, replayed if config.train.router_replay else step)
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sequence_parallel")
    write_model(root / "model", ModelSize(128, 2, 4, 2, 96, 64), seed=0)
    write_model(root / "teacher", ModelSize(64, 3, 2, 2, 64, 64), seed=1)
    write_family(
        root / "experts",
        "mixtral",
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return root


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[Any, Any]]:
    """What one learner finds, then what each of two finds."""
    return [*run_ranks(1, train_all, root), *run_ranks(2, train_all, root)]


def distance(gradients: dict[Any, Any], expected: dict[Any, Any]) -> float:
    """The norm of the difference by the norm of what is expected, over all parameters."""
    assert gradients.keys() == expected.keys()
    off, whole = (
        sum(float(np.square(own).sum()) for own in each)
        for each in ([gradients[name] - expected[name] for name in expected], expected.values())
    )
    return float((off / whole) ** 0.5)


@pytest.mark.parametrize("case", [*(f"{dtype}, ZeRO-{stage}" for dtype, stage in STAGES), *VARIANTS, *TASKS])
def test_two_learners_that_share_a_row_give_the_loss_and_gradients_of_one(found: Any, case: str) -> None:
    """Gradients are those that DeepSpeed's optimizer is given, since AdamW hides a factor."""
    bounds = {"float32": (1e-6, 1e-5), "bfloat16": (1e-3, 1e-2)}
    of_loss, of_gradients = bounds["bfloat16" if case.startswith("bfloat16") else "float32"]
    alone, *together = found
    for key in [key for key in alone if key[0] == case]:
        gradients, metrics = alone[key]
        expected = merge([metrics])
        assert "loss/policy" in expected
        assert ("loss/router_aux" in expected) == (case == "experts")
        for rank in together:
            assert merge([rank[key][1]]) == pytest.approx(expected, rel=of_loss, abs=of_loss), key
            assert distance(rank[key][0], gradients) < of_gradients, key


VALUES = [[scale * each for each in range(1, 9)] for scale in (1.0, 10.0, 100.0, 1000.0)]
"""Advantages of four completions of 8 tokens after 4 of a prompt; the mean of their means is 1249.875."""


def train_on_values(rank: int, world_size: int, store: Any, root: Path) -> dict[int, Any]:
    """Return gradients and metrics by the degree of sequence parallelism, the rest of the learners data parallel."""
    learners, found = Learners(rank, world_size, store, root), {}
    sequences = []
    for index, values in enumerate(VALUES):
        sequence = ordinary_sequence(index, 0, np.arange(12) + 3 * index + 2, 8)
        advantages = np.array([*[0.0] * 4, *values], np.float32)
        sequences.append(replace(sequence, advantages=advantages))
    for degree in (1, 2, 4)[: world_size.bit_length()]:
        loss = {"name": "grpo", "denominator": "sequences", "correction": "none", "kl": {"coef": 0.0}}
        _, learner = learners.build({"loss": loss}, "wide", sequence_parallel=degree)
        share = replace(minibatch_of(sequences), sequences=tuple(sequences[rank // degree :: world_size // degree]))
        found[degree] = gradients_of(learner, [share])
    return found


def test_four_learners_find_the_mean_of_means_in_every_factorisation(tmp_path: Path) -> None:
    """The inputs of slime's tests/test_loss_cp_invariance.py (THUDM/slime), through a real model."""
    write_model(tmp_path / "wide", ModelSize(128, 1, 4, 4, 64, 64), seed=0)
    (alone,), four = (run_ranks(size, train_on_values, tmp_path) for size in (1, 4))
    gradients, _ = alone[1]
    for degree in (1, 2, 4):
        assert merge([rank[degree][1] for rank in four[::degree]])["loss/policy"] == pytest.approx(-1249.875, rel=1e-6)
        for rank in four:
            assert distance(rank[degree][0], gradients) < 1e-5


def train_and_save(rank: int, world_size: int, store: Any, root: Path, stage: int) -> dict[str, Any]:
    """Two steps, a checkpoint and a third step; the third also from the other's checkpoint, where there is one."""
    import torch.distributed as dist

    from hpc_grpo.cli.replay import load_here
    from hpc_grpo.learner.checkpoint import load_checkpoint, write_universal
    from hpc_grpo.run.checkpoint import valid_checkpoints
    from hpc_grpo.run.paths import RunDir

    learners, found, step = Learners(rank, world_size, store, root), {}, make_step()
    _, learner = learners.build({}, zero_stage=stage, lr=1e-3)
    runs = {size: RunDir(root / f"{size}_learners" / f"stage_{stage}") for size in (1, 2)}
    if not runs[world_size].checkpoint(2).exists():
        for _ in range(2):
            learner.train_step(step)
        save_together(learner, runs[world_size].checkpoint(2), {})()
        learner.train_step(step)
        found["straight"] = weights_of(learner)
    if (other := runs[3 - world_size].checkpoint(2)).exists():
        _, learner = learners.build({}, zero_stage=stage, lr=1e-3)
        if world_size == 1:
            load_here(learner, next(valid_checkpoints(runs[2])))
        else:
            if rank == 0:
                write_universal(other)
            dist.barrier()
            load_checkpoint(learner, other)
        learner.train_step(step)
        found["resumed"] = weights_of(learner)
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
def test_a_run_resumes_on_another_degree(root: Path, stage: int) -> None:
    (one,), (two, _), (again,) = (run_ranks(size, train_and_save, root, stage) for size in (1, 2, 1))
    for resumed in (two["straight"], two["resumed"], again["resumed"]):
        for name, own in resumed.items():
            np.testing.assert_allclose(own, one["straight"][name], rtol=1e-4, atol=1e-5, err_msg=name)
