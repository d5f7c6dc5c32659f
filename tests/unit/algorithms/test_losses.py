from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_grpo.algorithms.objective import policy_objective
from hpc_grpo.algorithms.tasks import negative_log_likelihood
from hpc_grpo.algorithms.terms import LossInputs, interpolated_proximal
from tests.support.configs import loss_of


def inputs(ratios: list[float], advantages: list[float]) -> LossInputs:
    """Tokens whose ratio to the proximal policy is `ratios`. The engine sampled from the proximal policy."""
    proximal = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    logprobs = (proximal + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    ids = torch.zeros(len(ratios), dtype=torch.int64)
    return LossInputs(logprobs, proximal, proximal, None, torch.tensor(advantages, dtype=torch.float64), ids)


@pytest.mark.parametrize(
    ("engine", "learner", "versions", "version", "expected"),
    [
        ([-1.0, -2.0, -3.0], [-1.5, -2.5, -3.5], [0, 0, 0], 2, [-1.25, -2.25, -3.25]),
        ([-1.0, -2.0], [-1.5, -2.2], [0, 2], 4, [-1.375, -2.1]),
        ([-1.0], [-2.0], [4], 5, [-1.0]),
        ([-1.0], [-2.0], [3], 3, [-1.0]),
    ],
    ids=["half of the steps", "mixed versions", "sampled by the proximal policy", "no step between"],
)
def test_the_proximal_policy_is_interpolated_as_areal_does(
    engine: list[float], learner: list[float], versions: list[int], version: int, expected: list[float]
) -> None:
    """The numbers of AReaL's tests/test_prox_approx.py."""
    live, sampled = torch.tensor(learner, requires_grad=True), torch.tensor(engine)
    tokens = LossInputs(live, live.detach(), sampled, None, sampled, torch.zeros(len(engine), dtype=torch.int64))
    found = interpolated_proximal(tokens, torch.tensor(versions).double(), version - 1, version)
    assert found.tolist() == pytest.approx(expected, rel=1e-6)
    assert not found.requires_grad


def test_extreme_logprobs_stay_finite() -> None:
    far = torch.tensor([-1e4, 0.0])
    other = far.flip(0)
    tokens = LossInputs(far.clone().requires_grad_(), other, other, other, far * 0, torch.zeros(2, dtype=torch.int64))
    settings = loss_of(kl={"coef": 0.1})
    output = policy_objective(settings).loss(tokens)
    assert all(values.isfinite().all() for values in (output.per_token, *output.means.values()))


def test_the_entropy_bonus_is_one_term_of_the_loss() -> None:
    settings = loss_of(entropy_coef=0.5)
    entropy = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    tokens = replace(inputs([1.0, 1.0], [1.0, -1.0]), entropy=entropy)
    output = policy_objective(settings).loss(tokens)
    assert output.per_token.tolist() == pytest.approx([-2.0, -0.5])
    assert output.terms["loss/entropy"].tolist() == [-1.0, -1.5]
    assert torch.autograd.grad(output.per_token.sum(), entropy)[0].tolist() == [-0.5, -0.5]


def test_sft_is_negative_log_likelihood() -> None:
    output = negative_log_likelihood(inputs([1.0, 1.0], [1.0, 1.0]))
    assert output.per_token.tolist() == pytest.approx([2.0, 2.0])


_SEQUENCE_LEVEL_LOSS = """
import torch
from hpc_grpo.algorithms.terms import LossOutput

def gspo(inputs):
    count = torch.zeros(int(inputs.sequence_ids.max()) + 1, dtype=inputs.learner_logprobs.dtype)
    lengths = count.index_add(0, inputs.sequence_ids, torch.ones_like(inputs.learner_logprobs))
    sums = count.index_add(0, inputs.sequence_ids, inputs.learner_logprobs - inputs.proximal_logprobs)
    return LossOutput(-(sums / lengths).exp()[inputs.sequence_ids] * inputs.advantages)
"""


def test_a_loss_over_whole_sequences_is_one_file_of_the_users(tmp_path: Path) -> None:
    (tmp_path / "gspo.py").write_text(_SEQUENCE_LEVEL_LOSS)
    tokens = inputs([1.0, 4.0, 3.0], [1.0, 1.0, -1.0])
    tokens = replace(tokens, sequence_ids=torch.tensor([0, 0, 1]))
    output = loss_of(name=f"{tmp_path}/gspo.py:gspo").term(tokens)
    assert output.per_token.tolist() == pytest.approx([-2.0, -2.0, 3.0])
