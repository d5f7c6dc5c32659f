from __future__ import annotations

import numpy as np
import pytest
import torch

from hpc_grpo.learner.parts.critic import generalized_advantages, value_losses

VALUES = np.array([0.5, -0.25, 1.0], dtype=np.float32)


def test_with_lambda_one_the_advantage_is_the_discounted_return_minus_the_value() -> None:
    advantages, returns = generalized_advantages(2.0, VALUES, discount=0.5, gae_lambda=1.0)
    assert returns == pytest.approx([0.5, 1.0, 2.0])
    assert advantages == pytest.approx([0.0, 1.25, 1.0])


def test_with_lambda_zero_the_advantage_is_the_error_of_one_step() -> None:
    advantages, returns = generalized_advantages(2.0, VALUES, discount=1.0, gae_lambda=0.0)
    assert advantages == pytest.approx([-0.75, 1.25, 1.0])
    assert returns == pytest.approx([-0.25, 1.0, 2.0])


def test_the_advantage_is_the_sum_over_later_errors_that_the_paper_defines() -> None:
    random = np.random.default_rng(3)
    values = random.normal(size=9).astype(np.float32)
    discount, gae_lambda, reward = 0.9, 0.7, 1.5
    rewards = np.array([0.0] * 8 + [reward])
    errors = rewards + discount * np.append(values[1:], 0.0) - values
    weights = (discount * gae_lambda) ** np.arange(9)
    expected = [float((weights[: 9 - t] * errors[t:]).sum()) for t in range(9)]
    advantages, _ = generalized_advantages(reward, values, discount, gae_lambda)
    np.testing.assert_allclose(advantages, expected, rtol=1e-5)


def test_a_clipped_value_loses_what_the_worse_of_both_loses() -> None:
    predicted, old, returns = torch.tensor([1.0, 1.0, 0.1]), torch.zeros(3), torch.tensor([2.0, 0.0, 0.0])
    assert value_losses(predicted, old, returns, None).tolist() == pytest.approx([0.5, 0.5, 0.005])
    assert value_losses(predicted, old, returns, 0.2).tolist() == pytest.approx([0.5 * 1.8**2, 0.5, 0.005])
