"""The balancing loss and the routers of mixtures of experts, against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hpc_grpo.learner.experts import Routers
from hpc_grpo.learner.model import load_policy
from hpc_grpo.learner.packing import pack
from hpc_grpo.weights.contract import MIXTURES
from tests.support.sequences import with_experts
from tests.support.tiny_models import write_family
from tests.unit.learner.test_model import grouped_sequences, make_config, plain_logprobs


@pytest.fixture(scope="module", params=MIXTURES)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    jitter = {"router_jitter_noise": 0.3} if request.param == "mixtral" else {}
    return write_family(tmp_path_factory.mktemp(request.param), request.param, **jitter)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_balance_is_transformers_loss_of_each_sequence(
    model_path: Path, shares_prompts: bool, checkpointing: bool
) -> None:
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=checkpointing)
    plain = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager").eval()
    sequences = grouped_sequences()
    batch = pack(sequences, shares_prompts=shares_prompts)
    assert (len(batch.document_lengths) > len(sequences)) == shares_prompts
    _, _, balance = policy(batch, with_balance=True)
    expected = torch.stack([
        load_balancing_loss_func(
            plain(torch.tensor(each.token_ids)[None].long(), output_router_logits=True).router_logits, 4, 2
        )
        for each in sequences
    ])  # fmt: skip
    assert float(expected.detach().std()) > 0.01
    torch.testing.assert_close(balance, expected[batch.sequence_ids], rtol=0.0, atol=1e-5)
    weights = torch.linspace(-1.0, 1.0, len(balance))
    (balance * weights).sum().backward()
    (expected[batch.sequence_ids] * weights).sum().backward()
    theirs = dict(plain.named_parameters())
    num_routed = 0
    for name, parameter in policy.hf_named_parameters():
        if theirs[name].grad is not None:
            num_routed += name.endswith(".gate.weight")
            largest = float(theirs[name].grad.abs().max())
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=0.0, atol=1e-4 * largest, msg=name)
    assert num_routed == 2


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("shares_prompts", [False, True])
def test_replayed_experts_give_the_logprobs_and_gradients_of_transformers_with_these_experts(
    model_path: Path, shares_prompts: bool, checkpointing: bool
) -> None:
    """A backward pass comes after a forward pass with other experts. A replay one token late is far off."""
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=checkpointing)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, **eager).eval()
    forced: list[torch.Tensor] = []
    for layer, own in enumerate(plain.model.layers):

        def choose(router: Any, args: Any, output: Any, layer: int = layer) -> Any:
            chosen = forced[-1][:, layer].long()
            weights = output[0].double().softmax(dim=-1).gather(1, chosen)
            return output[0], weights / weights.sum(dim=-1, keepdim=True), chosen

        own.mlp.gate.register_forward_hook(choose)
    sequences = with_experts(grouped_sequences())
    late = [replace(own, experts=np.roll(own.experts, 1, axis=0)) for own in sequences]
    batch, after, own_choice = (
        pack(each, shares_prompts=shares_prompts) for each in (sequences, late, grouped_sequences())
    )
    expected = []
    for each in sequences:
        forced.append(torch.from_numpy(each.experts))
        expected.append(plain_logprobs(plain, each, 0.7))
    logprobs, _ = policy(batch)
    torch.testing.assert_close(logprobs.double(), torch.cat(expected), rtol=0.0, atol=3e-5)  # float32's rounding
    for other in (after, own_choice):
        with torch.no_grad():
            assert float((policy(other)[0] - logprobs).abs().mean()) > 0.05
    weights = torch.linspace(-1.0, 1.0, len(logprobs))
    (logprobs * weights).sum().backward()
    (torch.cat(expected) * weights).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in policy.hf_named_parameters():
        largest = float(theirs[name].grad.abs().max())
        assert largest > 0.0
        off = float((parameter.grad.double() - theirs[name].grad).abs().max())
        assert off < 1e-4 * largest, name


def test_routers_of_a_bfloat16_model_compute_in_float32(model_path: Path) -> None:
    config = make_config(model_path, model={"dtype": "bfloat16"})
    [router, *_] = Routers(load_policy(config, use_gradient_checkpointing=False).language_model).modules
    hidden = torch.randn(64, router.hidden_dim, dtype=torch.bfloat16)
    logits, weights, _ = router(hidden)
    torch.testing.assert_close(logits.double(), hidden.double() @ router.weight.double().t(), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(64), rtol=0.0, atol=1e-6)
