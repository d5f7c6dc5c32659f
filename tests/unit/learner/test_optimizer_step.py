"""The optimizer step, on a DeepSpeed engine of one weight under AdamW."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpc_grpo.learner.setup import optimizer_step


class FakeEngine:
    """Steps as DeepSpeed does: AdamW, then the schedule, then the count."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1, weight_decay=0.1)
        self.num_scheduled = 0
        self.lr_scheduler = SimpleNamespace(step=self._schedule)
        self.dp_world_size, self.global_steps, self.skipped_steps = 2, 0, 0
        self.boundaries: list[bool] = []

    def _schedule(self) -> None:
        self.num_scheduled += 1

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.boundaries.append(is_boundary)

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.lr_scheduler.step()
        self.global_steps += 1

    def get_global_grad_norm(self) -> float:
        assert self.weight.grad is not None
        return float(self.weight.grad.norm())


def step(engine: FakeEngine, divisor: int) -> float | None:
    """Two microbatches, whose losses are 3 and 5 times the weight."""
    losses: Any = [lambda: 3.0 * engine.weight.sum(), lambda: 5.0 * engine.weight.sum()]
    return optimizer_step(engine, losses, divisor, "policy", "train.lr")


def test_the_losses_of_all_microbatches_are_divided_once_for_all_ranks() -> None:
    engine = FakeEngine()
    assert step(engine, divisor=4) == pytest.approx((3 + 5) * 2 / 4)
    assert engine.boundaries == [False, True]


def test_a_step_without_tokens_is_counted_and_neither_momentum_nor_decay_moves_the_weights() -> None:
    engine = FakeEngine()
    step(engine, divisor=4)
    before = engine.weight.item()
    assert before != 1.0, "Adam has a momentum"
    assert step(engine, divisor=0) is None
    assert engine.weight.item() == before
    assert (engine.global_steps, engine.skipped_steps, engine.num_scheduled) == (2, 1, 2)
    assert engine.boundaries == [False, True], "no gradient was computed"
