"""Attention by grids against scores of all tokens at once, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hpc_grpo.learner.layout import document_layout

from hpc_grpo.learner.attention import packed_sdpa


def naive(heads: tuple[torch.Tensor, ...], lengths: list[int], prompts: list[int | None]) -> torch.Tensor:
    """`[1, T, H, D]`: softmax over all pairs that are allowed, one by one."""
    documents = np.repeat(np.arange(len(lengths)), lengths)
    places = np.concatenate([np.arange(length) for length in lengths])
    allowed = (documents[:, None] == documents[None, :]) & (places[:, None] >= places[None, :])
    own_prompts = np.array([-1 if prompt is None else prompt for prompt in prompts])[documents]
    allowed |= own_prompts[:, None] == documents[None, :]
    query, key, value = heads
    key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    weights = scores.masked_fill(~torch.from_numpy(allowed), -torch.inf).softmax(-1)
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize(
    ("lengths", "prompts"),
    [
        ([5, 5, 5], [None] * 3),
        ([9, 200, 3, 40, 41, 198, 1], [None] * 7),
        ([6, 3, 3], [None, 0, 0]),
        ([7, 90, 2, 88, 1, 4, 5, 3, 60], [None, 0, 0, 0, 0, None, 5, 5, None]),
        ([1, 8, 5, 2, 120, 2], [None, 0, 0, None, 3, 3]),
    ],
    ids=["equal", "cut by length", "one group", "groups among documents", "short prompts"],
)
def test_grids_give_the_attention_of_all_pairs_and_its_gradient(lengths: list[int], prompts: list[int | None]) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, 2, 2)]
    heads = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    layout = document_layout(lengths, "cpu", prompts, torch.float64)
    ours, _ = packed_sdpa(None, *heads, None, document_layout=layout)
    theirs = naive(heads, lengths, prompts)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((each * weights).sum(), heads) for each in (ours, theirs)]
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


def test_one_long_document_does_not_pad_the_others() -> None:
    layout = document_layout([200] * 28 + [5000] + [200] * 28, "cpu")
    assert [(grid.num_rows, grid.length) for grid in layout.grids] == [(1, 5000), (56, 200)]
    assert layout.max_length == 5000


def test_documents_of_like_lengths_are_one_call_of_the_kernel() -> None:
    layout = document_layout([20, 24, 22, 21], "cpu")
    assert [(grid.num_rows, grid.length) for grid in layout.grids] == [(4, 24)]
    assert document_layout([20] * 4, "cpu").to_grids is None
