"""Losses against liger-kernel's `LigerFusedLinearGRPOFunction` on the same random groups, on CPU and not compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_grpo.algorithms.objective import policy_objective
from hpc_grpo.algorithms.terms import LossInputs
from tests.support.configs import loss_of

NONE = {"correction": "none"}

LIGER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo over sequences": ({"denominator": "sequences"}, {"loss_type": "grpo"}),
    "bnpo": ({"name": "bnpo"}, {"loss_type": "bnpo"}),
    "dapo": ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": ({"name": "dr_grpo"}, {"loss_type": "dr_grpo", "max_completion_length": 9}),
    "cispo": ({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": ({"name": "sapo"}, {"loss_type": "sapo"}),
    "gspo": (
        {"name": "gspo", "clip_low": 0.02, "clip_high": 0.03},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.02, "epsilon_high": 0.03},
    ),
    "dual clip": ({"args": {"dual_clip": 1.5}}, {"loss_type": "dapo", "delta": 1.5}),
    "TIS 1.2": ({"correction": {"name": "truncated", "args": {"cap": 1.2}}}, {"loss_type": "dapo"}),
    "k3": ({"kl": {"coef": 0.1}}, {"loss_type": "dapo", "beta": 0.1}),
    "unbiased KL": (
        {"kl": {"coef": 0.1, "estimator": "unbiased"}},
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
}


@pytest.mark.parametrize("variant", LIGER)
def test_ligers_fused_loss_gives_the_same_loss_and_gradient(variant: str, show: Callable[[str], None]) -> None:
    module = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    ours, theirs = LIGER[variant]
    batch, longest, width, vocabulary = 4, 9, 8, 13
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = normal(batch, longest, width), normal(vocabulary, width) * 0.3
    ids = torch.randint(vocabulary, (batch, longest), generator=generator)
    lengths = torch.tensor([9, 4, 1, 7])
    mask = torch.arange(longest) < lengths[:, None]
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    proximal, engine, reference = (logprobs + 0.4 * normal(batch, longest) for _ in range(3))
    advantages = normal(batch)
    settings = loss_of(**{**NONE, **ours})

    def own_loss(live: Tensor) -> Tensor:
        inputs = LossInputs(
            (live @ weight.T).log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)[mask],
            proximal[mask], engine[mask], reference[mask] if settings.kl.coef else None,
            advantages.repeat_interleave(lengths), torch.arange(batch).repeat_interleave(lengths),
        )  # fmt: skip
        objective = policy_objective(settings)
        output = objective.loss(inputs)
        weights = objective.token_weights(longest, inputs.sequence_ids, torch.ones(len(inputs.advantages)).double())
        return torch.dot(output.per_token, weights.of_tokens) / weights.units

    def their_loss(live: Tensor) -> Tensor:
        tis = (proximal - engine).exp().clamp(max=1.2) if variant.startswith("TIS") else None
        arguments = {"ref_per_token_logps": reference, "old_per_token_logps": proximal, "beta": 0.0, **theirs}
        names = "bias ref_per_token_logps old_per_token_logps ref_input ref_weight ref_bias beta epsilon_low "
        names += "epsilon_high loss_type max_completion_length importance_sampling_level sapo_temperature_pos "
        names += "sapo_temperature_neg temperature compiled use_ref_model chunk_size vllm_is_ratio delta "
        names += "use_bias_correction_kl"
        defaults = {
            "epsilon_low": 0.2, "epsilon_high": 0.2, "importance_sampling_level": "token", "temperature": 1.0,
            "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "compiled": False, "chunk_size": 1,
            "use_ref_model": True, "use_bias_correction_kl": False, "vllm_is_ratio": tis,
        }  # fmt: skip
        given = [{**defaults, **arguments}.get(name) for name in names.split()]
        function = module.LigerFusedLinearGRPOFunction
        return function.apply(live, weight, ids, mask.double(), advantages, *given)[0]

    results = []
    for loss_function in (own_loss, their_loss):
        live = hidden.clone().requires_grad_()
        loss = loss_function(live)
        results.append((loss.item(), torch.autograd.grad(loss, live)[0]))
    (loss, grad), (their, their_grad) = results
    apart = (grad - their_grad).abs().max().item()
    numbers = f"{their:.6g} | {loss:.6g} | {abs(loss - their):.1e}, gradient {apart:.1e}"
    show(f"| liger-kernel LigerFusedLinearGRPOFunction | {variant} | {numbers} |")
    assert loss == pytest.approx(their, abs=1e-6)
    assert apart < 1e-6
