from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_grpo.algorithms.corrections import Truncated
from hpc_grpo.algorithms.losses import LossSettings
from hpc_grpo.algorithms.objective import policy_objective
from hpc_grpo.algorithms.tasks import negative_log_likelihood
from hpc_grpo.algorithms.terms import LossInputs, kl_k3
from tests.support.configs import loss_of


def inputs(
    ratios: list[float], advantages: list[float], mismatch: float = 1.0, ref_log_ratio: float | None = None
) -> LossInputs:
    """Tokens whose ratio to the proximal policy is `ratios`, and engine probability 1/mismatch of the proximal."""
    proximal = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    logprobs = (proximal + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    reference = None if ref_log_ratio is None else logprobs.detach() + ref_log_ratio
    engine = proximal - math.log(mismatch)
    sequence_ids = torch.zeros(len(ratios), dtype=torch.int64)
    return LossInputs(
        logprobs, proximal, engine, reference, torch.tensor(advantages, dtype=torch.float64), sequence_ids
    )


def gradient(loss_inputs: LossInputs, settings: LossSettings) -> tuple[Tensor, Tensor]:
    per_token = settings.term(loss_inputs).per_token
    return per_token.detach(), torch.autograd.grad(per_token.sum(), loss_inputs.learner_logprobs)[0]


def test_hand_computed_surrogate() -> None:
    settings = loss_of(clip_low=0.2, clip_high=0.3, correction="none")
    #                     in range, clipped high, not clipped (A < 0), clipped low (A < 0), not clipped (A > 0)
    tokens = inputs([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, -2.0, 2.0])
    per_token, grad = gradient(tokens, settings)
    assert per_token.tolist() == pytest.approx([-2.2, -2.6, 3.0, 1.6, -1.0])
    # d(-rA)/dlogprob = -rA where the ratio acts, 0 where the clip does
    assert grad.tolist() == pytest.approx([-2.2, 0.0, 3.0, 0.0, -1.0])


def test_clip_fraction_counts_only_where_the_clip_acts() -> None:
    output = loss_of().term(inputs([1.1, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, -2.0, 2.0]))
    assert output.means["policy/clip_fraction"].tolist() == [0.0, 1.0, 0.0, 1.0, 0.0]
    assert output.means["policy/ratio_mean"].mean().item() == pytest.approx(1.02)


def test_importance_weight_multiplies_the_policy_term_alone() -> None:
    settings = loss_of(correction={"cap": 2.0}, kl={"coef": 0.5})
    tokens = inputs([1.0], [1.0], mismatch=1.5, ref_log_ratio=0.1)
    per_token = policy_objective(settings).loss(tokens).per_token
    k3 = math.exp(0.1) - 0.1 - 1.0
    assert per_token.tolist() == pytest.approx([-1.5 + 0.5 * k3])


def test_importance_weight_is_capped_and_carries_no_gradient() -> None:
    proximal = torch.tensor([0.0, 0.0, 0.0, -1.0], requires_grad=True)
    engine, zeros = torch.tensor([-0.5, -5.0, -1e9, 0.0]), torch.zeros(4)
    weights = Truncated(cap=2.0).weigh(LossInputs(zeros, proximal, engine, None, zeros, zeros.long())).weights
    assert weights.tolist() == pytest.approx([math.exp(0.5), 2.0, 2.0, math.exp(-1.0)])
    assert not weights.requires_grad


def test_on_policy_gradient_is_the_advantage_whatever_the_importance_cap() -> None:
    tokens = inputs([1.0, 1.0], [0.7, -0.3])
    _, grad = gradient(tokens, loss_of())
    assert grad.tolist() == pytest.approx([-0.7, 0.3])


def test_k3_is_zero_at_equality_never_negative_and_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(-1)
    q = torch.randn(20, generator=generator, dtype=torch.float64).log_softmax(-1)
    estimates = kl_k3(p, q)
    assert (estimates >= 0).all()
    assert kl_k3(p, p).abs().max() == 0
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * estimates).sum(), exact)


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
