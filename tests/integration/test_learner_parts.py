"""Parts of a learner under real DeepSpeed: LoRA in the policy, and a baseline that makes the advantages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from hpc_grpo.demo.model import ModelSize, write_model
from hpc_grpo.learner.parts import LearnerPart
from hpc_grpo.metrics.reductions import Mean, merge
from tests.integration.learner_processes import (
    make_config,
    make_step,
    run_ranks,
    save_together,
    weights_of,
)
from tests.integration.naive_grpo import logprobs_of
from tests.support.tiny_models import TINY

pytestmark = pytest.mark.integration

ADAPTED = ("q_proj", "v_proj")


class LoraLinear(nn.Module):  # type: ignore[misc]
    """LoRA (arXiv:2106.09685): a frozen linear layer, and a trained product of rank 2 added to it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.requires_grad_(False)
        self.bias = None if linear.bias is None else linear.bias.requires_grad_(False)
        rows, columns = getattr(linear.weight, "ds_shape", linear.weight.shape)
        self.lora_a = nn.Parameter(torch.linspace(-0.1, 0.1, 2 * columns).reshape(2, columns))
        self.lora_b = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        adapted = functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)
        return functional.linear(inputs, self.weight, self.bias) + adapted

    def merged_weight(self) -> Tensor:
        return self.weight + self.lora_b @ self.lora_a


class Lora(LearnerPart):
    def change_policy(self, policy: Any) -> None:
        policy.requires_grad_(False)
        for name, module in list(policy.named_modules()):
            if name.endswith(ADAPTED):
                policy.set_submodule(name, LoraLinear(module))


class Baseline(LearnerPart):
    """Subtracts the number of steps that it has seen: its state goes into the checkpoint."""

    steps = 0.0

    def before_step(self, minibatches: Any) -> Any:
        self.steps += 1.0
        lowered = [
            replace(batch, sequences=tuple(self._lowered(sequence) for sequence in batch.sequences))
            for batch in minibatches
        ]
        return lowered, {"baseline/steps": Mean(self.steps, 1)}

    def save(self, folder: Path, files: Any) -> None:
        files.save({"steps": self.steps}, folder / "baseline.pt")

    def load(self, folder: Path, files: Any) -> None:
        self.steps = files.load(str(folder / "baseline.pt"))["steps"]

    def _lowered(self, sequence: Any) -> Any:
        return replace(sequence, advantages=sequence.advantages - np.float32(self.steps) * sequence.loss_mask)


def train_with_parts(rank: int, world_size: int, store: Any, model: Path, root: Path) -> dict[int, Any]:
    """Two steps under each ZeRO stage, a checkpoint, a third step; the third once more from the checkpoint."""
    from hpc_grpo.learner.checkpoint import load_checkpoint
    from hpc_grpo.learner.learner import PARTS, Learner

    PARTS.update({Lora: lambda config: True, Baseline: lambda config: True})
    results = {}
    for stage in (1, 2, 3):
        config = make_config(model, root, zero_stage=stage)
        learner = Learner(config, rank, world_size, store)
        before = weights_of(learner)
        metrics = [learner.train_step(make_step(seed, rank, world_size)) for seed in (1, 2)]
        folder = root / f"{world_size}_{stage}"
        save_together(learner, folder, {}, behind=True)()
        metrics.append(learner.train_step(make_step(3, rank, world_size)))
        fresh = Learner(config, rank, world_size)
        load_checkpoint(fresh, folder)
        again = fresh.train_step(make_step(3, rank, world_size))
        results[stage] = (before, metrics, weights_of(learner), again, weights_of(fresh))
    return results


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, TINY, seed=0)
    return folder


def test_parts_change_the_policy_and_its_advantages_and_resume_with_it(model: Path, tmp_path: Path) -> None:
    alone = run_ranks(1, train_with_parts, model, tmp_path)[0]
    (shared, _) = run_ranks(2, train_with_parts, model, tmp_path)
    for by_stage in (alone, shared):
        for before, metrics, after, again, after_again in by_stage.values():
            changed = {name for name in before if not np.array_equal(before[name], after[name])}
            assert changed == {name for name in before if name.removesuffix(".weight").endswith(ADAPTED)}
            assert [step["baseline/steps"].total for step in metrics] == [1.0, 2.0, 3.0]
            assert again["baseline/steps"].total == 3.0
            assert all(np.array_equal(after[name], after_again[name]) for name in after)
    for stage in (1, 2, 3):
        for name, weight in alone[1][2].items():
            np.testing.assert_allclose(shared[stage][2][name], weight, atol=2e-5, err_msg=f"{stage} {name}")


def with_other_reference(rank: int, world_size: int, store: Any, root: Path, stage: int) -> float:
    from hpc_grpo.learner.learner import Learner

    config = make_config(root / "model", root, zero_stage=stage)
    kl = config.loss.kl.model_copy(update={"reference": str(root / "other")})
    config = config.model_copy(update={"loss": config.loss.model_copy(update={"kl": kl})})
    learner = Learner(config, rank, world_size, store)
    return merge([learner.train_step(make_step(1, rank, world_size))])["kl/learner_ref"]


@pytest.mark.parametrize("stage", [1, 3])
def test_the_reference_may_be_another_model(tmp_path: Path, stage: int) -> None:
    """Of another size, with the same tokens: the KL of the first step is that of the two models."""
    write_model(tmp_path / "model", ModelSize(64, 2, 2, 1, 64, 64), seed=0)
    write_model(tmp_path / "other", ModelSize(128, 1, 2, 1, 64, 64), seed=1)
    (found,) = run_ranks(1, with_other_reference, tmp_path, stage)
    config = make_config(tmp_path / "model", tmp_path)
    own, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "other"))
    with torch.no_grad():
        gaps = torch.cat(
            [
                logprobs_of(other, sequence, config) - logprobs_of(own, sequence, config)
                for sequence in make_step(1, 0, 1)[0].sequences
            ]
        )
    assert found == pytest.approx(float((gaps.expm1() - gaps).mean()), rel=1e-4)
    assert found > 1e-3
