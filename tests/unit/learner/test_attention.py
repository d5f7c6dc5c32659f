"""The kernels by themselves; test_model compares their values with the plain model's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner import attention
from hpc_grpo.learner.attention import (
    document_layout,
    has_grouped_kernel,
    packed_sdpa,
    packed_varlen,
    register_kernels,
    require_flash_attention,
    varlen_layout,
)
from tests.support.varlen import attend_by_documents


def test_kernel_refuses_what_it_does_not_compute() -> None:
    heads = torch.randn(1, 2, 6, 8)
    layout = document_layout((2, 4), "cpu")
    for options, message in (
        ({"attention_mask": torch.zeros(1)}, "an attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"softcap": 30.0}, "softcap"),
    ):
        arguments = {"attention_mask": None, "packed_layout": layout, **options}
        with pytest.raises(ConfigError, match=message):
            packed_sdpa(None, heads, heads, heads, **arguments)
    packed_sdpa(None, heads, heads, heads, None, sliding_window=4, packed_layout=layout)


@pytest.mark.parametrize(
    ("device", "dtype", "head_size", "expected"),
    [
        ("cuda", torch.bfloat16, 128, True),
        ("cuda", torch.bfloat16, 512, False),
        ("cuda", torch.float32, 128, False),
        ("cpu", torch.float32, 512, True),
    ],
)
def test_on_cuda_flash_attention_takes_grouped_heads(
    device: str, dtype: torch.dtype, head_size: int, expected: bool
) -> None:
    assert has_grouped_kernel(device, dtype, head_size) == expected


def test_registered_kernels_never_wait_for_a_plan_of_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    register_kernels()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_heads_are_repeated_where_no_fused_kernel_takes_them_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise torch falls back to scores `[H, T, T]` without a word."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 9, 8) for heads in (6, 2, 2))
    layout = document_layout((4, 5), "cpu")
    grouped, _ = packed_sdpa(None, query, key, value, None, packed_layout=layout)
    seen = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*heads: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(([tensor.shape[1] for tensor in heads], options["enable_gqa"]))
        return plain(*heads, **options)

    monkeypatch.setattr(attention, "has_grouped_kernel", lambda *_, **__: False)
    monkeypatch.setattr(attention.functional, "scaled_dot_product_attention", watched)
    repeated, _ = packed_sdpa(None, query, key, value, None, packed_layout=layout)
    assert seen == [([6, 6, 6], False)]
    torch.testing.assert_close(repeated, grouped)


def test_a_missing_flash_attention_is_an_error_that_names_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers with the package `kernels` would download one."""
    monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda: False)
    with pytest.raises(ConfigError, match=r"needs .* flash-attn.*set train\.attention: sdpa"):
        require_flash_attention()


LENGTHS, PROMPTS = (3, 5, 2, 7, 4), (None, 0, 0, None, 3)


@pytest.mark.parametrize("prompts", [PROMPTS, None])
def test_torchs_kernel_for_documents_sees_what_the_grids_see(
    monkeypatch: pytest.MonkeyPatch, prompts: tuple[int | None, ...] | None
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_documents)
    torch.manual_seed(0)
    heads = [torch.randn(1, number, sum(LENGTHS), 8, requires_grad=True) for number in (4, 2, 2)]
    upstream = torch.randn(1, sum(LENGTHS), 4, 8)
    results = []
    for output, _ in (
        packed_sdpa(None, *heads, None, packed_layout=document_layout(LENGTHS, "cpu", prompts)),
        packed_varlen(None, *heads, None, packed_layout=varlen_layout(LENGTHS, "cpu", prompts)),
    ):
        results.append([output.detach(), *torch.autograd.grad(output, heads, upstream)])
    for own, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_a_token_sees_so_many_as_a_sliding_window_has_also_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_documents)
    query, key = torch.zeros(1, 1, 5, 5), torch.zeros(1, 1, 5, 5)
    value = torch.eye(5)[None, None, :, :]
    layout = varlen_layout((3, 2), "cpu", (None, 0))
    weights, _ = packed_varlen(None, query, key, value, None, packed_layout=layout, sliding_window=3)
    third = 1 / 3
    expected = [
        [1.0, 0.0, 0.0, 0.0, 0.0],
        [0.5, 0.5, 0.0, 0.0, 0.0],
        [third, third, third, 0.0, 0.0],
        [0.0, third, third, third, 0.0],
        [0.0, 0.0, third, third, third],
    ]
    torch.testing.assert_close(weights[0, :, 0], torch.tensor(expected))


def test_torchs_kernel_is_asked_for_nothing_that_it_does_not_compute() -> None:
    heads = torch.randn(1, 2, 6, 8)
    with pytest.raises(ConfigError, match=r"train.attention = varlen does not compute softcap"):
        packed_varlen(None, heads, heads, heads, None, packed_layout=varlen_layout((2, 4), "cpu"), softcap=30.0)
    with pytest.raises(ConfigError, match="does not receive the borders of sequences in a packed row"):
        packed_varlen(None, heads, heads, heads, None)


def test_torchs_kernel_is_not_given_values_of_another_width_than_queries() -> None:
    heads, values = torch.randn(1, 2, 6, 16), torch.randn(1, 2, 6, 8)
    with pytest.raises(ConfigError, match=r"model\.path have 8 and 16 channels\. Set train\.attention: sdpa"):
        packed_varlen(None, heads, heads, values, None, packed_layout=varlen_layout((2, 4), "cpu"))


def naive(
    heads: tuple[torch.Tensor, ...], lengths: list[int], prompts: list[int | None], window: int = 1000
) -> torch.Tensor:
    """`[1, T, H, D]`: softmax over all pairs that are allowed, one by one."""
    documents = np.repeat(np.arange(len(lengths)), lengths)
    places = np.concatenate([np.arange(length) for length in lengths])
    allowed = (documents[:, None] == documents[None, :]) & (places[:, None] >= places[None, :])
    own_prompts = np.array([-1 if prompt is None else prompt for prompt in prompts])[documents]
    allowed |= own_prompts[:, None] == documents[None, :]
    places += np.repeat([0 if prompt is None else lengths[prompt] for prompt in prompts], lengths)
    allowed &= places[:, None] - places[None, :] < window
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
@pytest.mark.parametrize("window", [None, 1, 4, 96])
def test_grids_give_the_attention_of_all_pairs_and_its_gradient(
    lengths: list[int], prompts: list[int | None], window: int | None
) -> None:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(lengths), 8) for heads in (4, 2, 2)]
    heads = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    layout = document_layout(lengths, "cpu", prompts)
    packed_sdpa(None, *heads, None, packed_layout=layout, sliding_window=7)  # another layer's
    ours, _ = packed_sdpa(None, *heads, None, packed_layout=layout, sliding_window=window)
    theirs = naive(heads, lengths, prompts, window or 1000)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    weights = torch.randn_like(ours)
    gradients = [torch.autograd.grad((each * weights).sum(), heads) for each in (ours, theirs)]
    for own, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10)


def test_grids_of_a_microbatch_are_seven_or_eight_calls_and_little_padding() -> None:
    """The numbers of docs/training.md: a call each, where varlen makes one and has no padding."""
    calls, shares = [], []
    for seed in range(20):
        drawn = np.random.default_rng(seed).exponential(1024.0, 99).clip(4, 4096).astype(np.int64) + 200
        sizes = np.sort(drawn[np.cumsum(drawn) <= 16_384])[::-1]
        grids = attention._cut_by_length(np.arange(len(sizes)), sizes, 0, attention._CELLS_OF_A_CALL["cuda"])
        calls.append(len(grids))
        shares.append(1.0 - np.sum(sizes**2) / sum(len(rows) * sizes[rows[0]] ** 2 for rows in grids))
    assert 7.0 <= np.mean(calls) <= 8.5
    assert 0.015 <= np.mean(shares) <= 0.025
