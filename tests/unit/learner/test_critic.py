from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.errors import HpcGrpoError
from hpc_grpo.learner import critic as critic_module
from hpc_grpo.learner.critic import Critic, generalized_advantages, value_losses
from hpc_grpo.learner.packing import zero_weight_batch
from hpc_grpo.run.pulse import PULSE
from tests.support.configs import minimal_config

VALUES = np.array([0.5, -0.25, 1.0], dtype=np.float32)
LAST = np.array([0.0, 0.0, 2.0], dtype=np.float32)


def test_with_lambda_one_the_advantage_is_the_discounted_return_minus_the_value() -> None:
    advantages, returns = generalized_advantages(LAST, VALUES, discount=0.5, gae_lambda=1.0)
    assert returns == pytest.approx([0.5, 1.0, 2.0])
    assert advantages == pytest.approx([0.0, 1.25, 1.0])


def test_with_lambda_zero_the_advantage_is_the_error_of_one_step() -> None:
    advantages, returns = generalized_advantages(LAST, VALUES, discount=1.0, gae_lambda=0.0)
    assert advantages == pytest.approx([-0.75, 1.25, 1.0])
    assert returns == pytest.approx([-0.25, 1.0, 2.0])


def test_the_advantage_is_the_sum_over_later_errors_that_the_paper_defines() -> None:
    random = np.random.default_rng(3)
    values = random.normal(size=9).astype(np.float32)
    discount, gae_lambda = 0.9, 0.7
    rewards = random.normal(size=9).astype(np.float32)
    errors = rewards + discount * np.append(values[1:], 0.0) - values
    weights = (discount * gae_lambda) ** np.arange(9)
    expected = [float((weights[: 9 - t] * errors[t:]).sum()) for t in range(9)]
    advantages, _ = generalized_advantages(rewards, values, discount, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_a_clipped_value_loses_what_the_worse_of_both_loses() -> None:
    predicted, old, returns = torch.tensor([1.0, 1.0, 0.1]), torch.zeros(3), torch.tensor([2.0, 0.0, 0.0])
    assert value_losses(predicted, old, returns, None).tolist() == pytest.approx([0.5, 0.5, 0.005])
    assert value_losses(predicted, old, returns, 0.2).tolist() == pytest.approx([0.5 * 1.8**2, 0.5, 0.005])


class FakeEngine:
    """Values every state with its only parameter, and does not train."""

    def __init__(self, grad_norm: float) -> None:
        self.grad_norm, self.value = grad_norm, torch.zeros(1, requires_grad=True)
        self.module, self.dp_world_size, self.global_steps, self.skipped_steps = self, 1, 7, 0
        self.lr_scheduler, self.device = None, torch.device("cpu")

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.value.expand(len(batch.mask))

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None: ...

    def step(self) -> None: ...

    def get_global_grad_norm(self) -> float:
        return self.grad_norm


@pytest.fixture
def critic_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeEngine], Critic]:
    def make(engine: FakeEngine) -> Critic:
        monkeypatch.setattr(critic_module, "build_value_engine", lambda *_: engine)
        return Critic(minimal_config(), 1, torch.device("cpu"))

    return make


def test_each_microbatch_of_the_critic_is_a_sign_of_progress(critic_with: Any) -> None:
    critic, batches = critic_with(FakeEngine(0.5)), [zero_weight_batch()] * 3
    before = PULSE._beat.count
    values = critic.values(batches)
    assert PULSE._beat.count == before + 3
    critic.train(batches, values, np.zeros(0, np.float32), num_valid_tokens=1)
    assert PULSE._beat.count == before + 6


def test_a_critic_with_nothing_to_train_on_counts_the_step_and_measures_nothing(critic_with: Any) -> None:
    engine = FakeEngine(0.5)
    critic, batches = critic_with(engine), [zero_weight_batch()]
    assert critic.train(batches, critic.values(batches), np.zeros(0, np.float32), num_valid_tokens=0) == {}
    assert (engine.global_steps, engine.skipped_steps) == (8, 1)


def test_a_critic_without_a_finite_gradient_ends_the_run_before_it_is_saved(critic_with: Any) -> None:
    critic, batches = critic_with(FakeEngine(float("nan"))), [zero_weight_batch()]
    with pytest.raises(
        HpcGrpoError,
        match=r"critic in optimizer step 7 is not finite \(nan\)\. Give a new run\.name and a lower task\.critic_lr",
    ):
        critic.train(batches, critic.values(batches), np.zeros(0, np.float32), num_valid_tokens=1)
