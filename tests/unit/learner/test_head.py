from __future__ import annotations

import pytest
import torch
from torch import nn

from hpc_grpo.learner.head import LogprobHead

NUM_TOKENS, WIDTH, VOCABULARY = 23, 16, 40


def test_chunks_change_neither_values_nor_gradients() -> None:
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.randn(VOCABULARY, WIDTH)), nn.Parameter(torch.randn(VOCABULARY))
    hidden, targets = torch.randn(NUM_TOKENS, WIDTH), torch.randint(VOCABULARY, (NUM_TOKENS,))
    upstream = torch.randn(NUM_TOKENS)
    results = []
    for chunk_tokens in (5, 100):
        states = hidden.clone().requires_grad_()
        logprobs, entropy = LogprobHead(weight, bias, chunk_tokens)(states, targets, 0.7)
        gradients = torch.autograd.grad((logprobs * upstream).sum(), (states, weight, bias))
        results.append((logprobs.detach(), entropy, *gradients))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    reference = ((hidden @ weight.T + bias) / 0.7).log_softmax(-1)
    torch.testing.assert_close(results[0][0], reference[torch.arange(NUM_TOKENS), targets].detach())
    torch.testing.assert_close(results[0][1], -(reference.exp() * reference).sum(-1).detach())
    assert not results[0][1].requires_grad


def test_logits_exist_for_one_chunk_at_a_time() -> None:
    vocabulary, chunk, count = 5000, 8, 64
    head = LogprobHead(nn.Parameter(torch.randn(vocabulary, WIDTH)), None, chunk)
    hidden = torch.randn(count, WIDTH, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        logprobs, _ = head(hidden, torch.randint(vocabulary, (count,)), 1.0)
    assert max(saved, default=0) < chunk * vocabulary
    logprobs.sum().backward()


@pytest.mark.parametrize("chunk_tokens", [1, 64])
def test_no_gradient_wanted(chunk_tokens: int) -> None:
    head = LogprobHead(nn.Parameter(torch.randn(VOCABULARY, WIDTH)), None, chunk_tokens)
    with torch.no_grad():
        logprobs, _ = head(torch.randn(4, WIDTH), torch.zeros(4, dtype=torch.long), 1.0)
    assert not logprobs.requires_grad
