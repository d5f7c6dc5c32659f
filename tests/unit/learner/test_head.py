"""The output layer against a plain matrix product and softmax."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hpc_grpo.learner.model import LogprobHead

VOCABULARY, NUM_TOKENS, WIDTH = 50, 23, 16


def head_of(weight: nn.Parameter, bias: nn.Parameter | None, chunk_tokens: int, **options: bool) -> LogprobHead:
    return LogprobHead(SimpleNamespace(weight=weight, bias=bias), chunk_tokens, **options)


def test_chunks_change_neither_values_nor_gradients() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(VOCABULARY, WIDTH)), nn.Parameter(torch.randn(VOCABULARY))
    hidden, targets = torch.randn(NUM_TOKENS, WIDTH), torch.randint(VOCABULARY, (NUM_TOKENS,))
    upstream = torch.randn(NUM_TOKENS)
    results = []
    for chunk_tokens in (5, 100):
        states = hidden.clone().requires_grad_()
        logprobs, entropy = head_of(weight, bias, chunk_tokens)(states, targets, 0.7)
        gradients = torch.autograd.grad((logprobs * upstream).sum(), (states, weight, bias))
        results.append((logprobs.detach(), entropy, *gradients))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    reference = ((hidden @ weight.T + bias) / 0.7).log_softmax(-1)
    torch.testing.assert_close(results[0][0], reference[torch.arange(NUM_TOKENS), targets].detach())
    torch.testing.assert_close(results[0][1], -(reference.exp() * reference).sum(-1).detach())
    assert not results[0][1].requires_grad


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_entropies_have_their_gradient_where_a_bonus_wants_it(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
    hidden, targets = torch.randn(NUM_TOKENS, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (NUM_TOKENS,))
    upstream = torch.randn(NUM_TOKENS)
    head = head_of(weight, None, chunk_tokens, entropy_gradient=True)
    _, entropy = head(hidden, targets, 0.7)
    found = torch.autograd.grad((entropy * upstream).sum(), (hidden, weight))
    reference = (hidden @ weight.T / 0.7).log_softmax(-1)
    plain = -(reference.exp() * reference).sum(-1)
    expected = torch.autograd.grad((plain * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    vocabulary, chunk, count = 5000, 8, 64
    head = head_of(nn.Parameter(torch.randn(vocabulary, WIDTH)), None, chunk)
    hidden = torch.randn(count, WIDTH, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        logprobs, _ = head(hidden, torch.randint(vocabulary, (count,)), 1.0)
    assert max(saved, default=0) < chunk * vocabulary
    logprobs.sum().backward()


@pytest.fixture(params=[None, "bias"])
def rounded(request: pytest.FixtureRequest) -> tuple[nn.Parameter, nn.Parameter | None, torch.Tensor, torch.Tensor]:
    """A bfloat16 output layer, hidden states and targets."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16))
    bias = nn.Parameter(torch.randn(VOCABULARY, dtype=torch.bfloat16)) if request.param else None
    hidden = torch.randn(NUM_TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return weight, bias, hidden, torch.randint(VOCABULARY, (NUM_TOKENS,))


def test_a_bfloat16_heads_logits_are_float32_from_the_start(rounded: Any) -> None:
    """vLLM's LogitsProcessor with head_dtype float32 multiplies the same upcast operands."""
    weight, bias, hidden, targets = rounded
    logits = functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
    expected = logits.log_softmax(-1)[torch.arange(NUM_TOKENS), targets]
    logprobs, _ = head_of(weight, bias, 100)(hidden, targets, 1.0)
    torch.testing.assert_close(logprobs, expected, rtol=0.0, atol=2e-6)
    coarse, _ = head_of(weight, bias, 100, in_float32=False)(hidden, targets, 1.0)
    assert (coarse - expected).abs().max() > 1e-3


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_a_bfloat16_heads_gradients_are_those_of_float32_to_its_precision(rounded: Any, chunk_tokens: int) -> None:
    weight, bias, hidden, targets = rounded
    inputs = [tensor for tensor in (hidden, weight, bias) if tensor is not None]
    upcast = [tensor.detach().float().requires_grad_() for tensor in inputs]
    logprobs, _ = head_of(weight, bias, chunk_tokens)(hidden, targets, 0.7)
    expected, _ = head_of(upcast[1], upcast[2] if bias is not None else None, 100)(upcast[0], targets, 0.7)
    torch.testing.assert_close(logprobs, expected)
    gradients = torch.autograd.grad(logprobs.sum(), inputs)
    for gradient, exact in zip(gradients, torch.autograd.grad(expected.sum(), upcast), strict=True):
        assert gradient.dtype == torch.bfloat16
        torch.testing.assert_close(gradient.float(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@pytest.mark.parametrize("chunk_tokens", [5, 100])
def test_a_head_without_entropies_gives_the_same_logprobs(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    head = head_of(nn.Parameter(torch.randn(VOCABULARY, WIDTH)), None, chunk_tokens)
    hidden, targets = torch.randn(NUM_TOKENS, WIDTH), torch.randint(VOCABULARY, (NUM_TOKENS,))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            logprobs, none = head(hidden, targets, 0.7, with_entropy=False)
            assert none is None
            assert torch.equal(logprobs, head(hidden, targets, 0.7)[0])
