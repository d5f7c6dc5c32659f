"""The learner's columns of docs/models.md: each family of models, packed, against plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpc_grpo.config.resources import Budget
from hpc_grpo.learner.model import check_packing, load_policy
from hpc_grpo.learner.packing import pack
from tests.support.tiny_models import FAMILIES, write_family
from tests.unit.learner.test_model import (
    UNEQUAL,
    logprobs_and_gradient,
    make_config,
    make_sequences,
    plain_logprobs,
)
from tests.unit.test_docs import REPOSITORY, table


@pytest.fixture(scope="module", params=FAMILIES)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp(request.param), request.param)


def test_a_packed_row_has_the_logprobs_and_gradients_of_plain_transformers(model_path: Path) -> None:
    """Documents of up to 33 tokens, four times the sliding windows."""
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=True)
    check_packing(policy, "model.path", "cpu")
    plain = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager").eval()
    sequences = make_sequences(UNEQUAL)
    packed, _ = policy(pack(sequences))
    expected = torch.cat([plain_logprobs(plain, sequence, 0.7) for sequence in sequences])
    torch.testing.assert_close(packed, expected, rtol=0.0, atol=1e-5)
    weights = torch.linspace(-1.0, 1.0, len(packed))
    (packed * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs = dict(plain.named_parameters())
    for name, parameter in policy.hf_named_parameters():
        largest = float(theirs[name].grad.abs().max())
        assert largest > 0.0, name
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=0.0, atol=1e-5 * largest, msg=name)


def test_a_shared_prompt_changes_no_number(model_path: Path) -> None:
    policy = load_policy(make_config(model_path), use_gradient_checkpointing=False)
    expected, gradient = logprobs_and_gradient(policy, Budget(1000))
    logprobs, own_gradient = logprobs_and_gradient(policy, Budget(64, shares_prompts=True))
    for place, own in logprobs.items():
        torch.testing.assert_close(own, expected[place], rtol=1e-5, atol=1e-5)
    assert float((own_gradient - gradient).norm() / gradient.norm()) < 2e-6


def test_bfloat16_is_as_near_to_float32_packed_as_in_plain_transformers(model_path: Path) -> None:
    small = load_policy(make_config(model_path, model={"dtype": "bfloat16"}), use_gradient_checkpointing=False)
    plain = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16).eval()
    exact = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    exact.load_state_dict(plain.state_dict())
    sequences = make_sequences(UNEQUAL)
    with torch.no_grad():
        packed, _ = small(pack(sequences, shares_prompts=True))
        plainly, expected = (torch.cat([plain_logprobs(own, one, 0.7) for one in sequences]) for own in (plain, exact))
    assert float((packed - expected).abs().mean()) < 1.25 * float((plainly - expected).abs().mean()) < 0.2


def test_the_page_has_a_row_for_each_family_that_is_tested() -> None:
    rows = table(REPOSITORY / "docs" / "models.md", "## Tested families")
    assert [row[0].strip("`") for row in rows if row[0].startswith("`")] == list(FAMILIES)
