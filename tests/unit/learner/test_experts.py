"""The balancing loss and the routers of mixtures of experts, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hpc_grpo.learner.experts import Routers
from hpc_grpo.learner.model import load_policy
from hpc_grpo.learner.packing import pack
from hpc_grpo.weights.contract import MIXTURES
from tests.support.tiny_models import write_family
from tests.unit.learner.test_model import grouped_sequences, make_config


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


def test_routers_of_a_bfloat16_model_compute_in_float32(model_path: Path) -> None:
    config = make_config(model_path, model={"dtype": "bfloat16"})
    [router, *_] = Routers(load_policy(config, use_gradient_checkpointing=False).language_model).modules
    hidden = torch.randn(64, router.hidden_dim, dtype=torch.bfloat16)
    logits, weights, _ = router(hidden)
    torch.testing.assert_close(logits.double(), hidden.double() @ router.weight.double().t(), rtol=0.0, atol=1e-5)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(64), rtol=0.0, atol=1e-6)
