from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpc_grpo.algorithms.tasks import algorithm_of
from hpc_grpo.algorithms.terms import LossInputs
from tests.support.configs import minimal_config

FILE = Path(__file__).parents[3] / "examples" / "proximal_pull_loss.py"


def test_a_loss_outside_the_package_is_trained_on_with_its_own_settings_and_a_built_in_correction() -> None:
    loss = {"name": f"{FILE}:proximal_pull", "args": {"strength": 0.5}, "correction": {"cap": 1.5}}
    config = minimal_config(loss=loss)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    proximal, advantages = torch.tensor([[-1.5, -1.0], [2.0, -1.0]], dtype=torch.float64)
    engine = proximal - 1.0
    inputs = LossInputs(logprobs, proximal, engine, None, advantages, torch.zeros(2, dtype=torch.int64))
    output = algorithm_of(config).objective().loss(inputs)
    gradient = torch.autograd.grad(output.per_token.sum(), logprobs)[0]
    # Weights of e are cut at 1.5; the gradient of a token is w * (strength * log ratio - A).
    assert gradient.tolist() == pytest.approx([1.5 * (0.5 * 0.5 - 2.0), 1.5 * (0.5 * -1.0 + 1.0)])
    assert output.means["policy/pull"].tolist() == pytest.approx([0.25 * 0.25, 0.25 * 1.0])
    assert output.means["correction/weight_mean"].tolist() == [1.5, 1.5]


def test_it_takes_less_than_thirty_lines() -> None:
    assert len(FILE.read_text().splitlines()) < 30
