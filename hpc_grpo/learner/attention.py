"""Attention over packed documents that never sees across a document's border, and never builds a T x T mask.

Letters: `T` tokens of the microbatch, `N` documents, `H` heads, `D` a head's width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hpc_grpo.errors import ConfigError

PACKED_SDPA = "packed_sdpa"


@dataclass(frozen=True)
class DocumentLayout:
    """The places of the tokens `[T]` of N documents in a right-padded grid `[N, Tmax]`.

    `to_grid` `[N * Tmax]` is the token of each cell (0 for padding), `to_tokens` `[T]` the cell of each token,
    `padding` `[N * Tmax]` True where a cell is padding. All three are None when the documents are equally long:
    then the grid is a view.
    """

    num_documents: int
    max_length: int
    to_grid: Tensor | None = None
    to_tokens: Tensor | None = None
    padding: Tensor | None = None


def document_layout(lengths: tuple[int, ...], device: Any) -> DocumentLayout:
    sizes = np.asarray(lengths, dtype=np.int64)
    longest = int(sizes.max())
    if (sizes == longest).all():
        return DocumentLayout(len(sizes), longest)
    starts = np.cumsum(sizes) - sizes
    column = np.arange(longest)
    real = column[None, :] < sizes[:, None]
    to_grid = np.where(real, starts[:, None] + column[None, :], 0).reshape(-1)
    to_tokens = np.flatnonzero(real)
    grid, tokens, padding = (torch.from_numpy(array).to(device) for array in (to_grid, to_tokens, ~real.reshape(-1)))
    return DocumentLayout(len(sizes), longest, grid, tokens, padding)


class _Pad(torch.autograd.Function):  # type: ignore[misc]
    """Turns `[T, ...]` into `[N * Tmax, ...]`. Has its own backward, since index_add_ works row by row on CPU."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, layout: DocumentLayout) -> Tensor:
        ctx.layout = layout
        return tokens.index_select(0, layout.to_grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A padding cell comes after every token of its document, so causal attention gives it no gradient.
        return grad.index_select(0, ctx.layout.to_tokens), None


class _Unpad(torch.autograd.Function):  # type: ignore[misc]
    """Turns `[N * Tmax, ...]` into `[T, ...]`."""

    @staticmethod
    def forward(ctx: Any, grid: Tensor, layout: DocumentLayout) -> Tensor:
        ctx.layout = layout
        return grid.index_select(0, layout.to_tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        padding = ctx.layout.padding.view(-1, *(1,) * (grad.dim() - 1))
        return grad.index_select(0, ctx.layout.to_grid).masked_fill_(padding, 0.0), None


def packed_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    document_layout: DocumentLayout,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each document; the signature is that of transformers' AttentionInterface.

    `query` `[1, H, T, D]`, `key` and `value` `[1, Hkv, T, D]`; returns `[1, T, H, D]`. Documents are gathered into
    a right-padded grid `[N, H, Tmax, D]`: with causal attention, padding on the right is seen by no real token,
    so no mask is needed and the fused kernels apply. Raises ValueError for what this kernel does not compute.
    """
    _check_supported(attention_mask, dropout, document_layout, kwargs)
    queries, keys, values = (_to_grid(tensor, document_layout) for tensor in (query, key, value))
    num_sharing = query.shape[1] // key.shape[1]
    if num_sharing > 1 and not has_grouped_kernel(query.device.type, query.dtype, query.shape[-1]):
        keys, values = (heads.repeat_interleave(num_sharing, dim=1) for heads in (keys, values))
    output = functional.scaled_dot_product_attention(
        queries, keys, values, is_causal=True, scale=scaling, enable_gqa=queries.shape[1] != keys.shape[1]
    )
    return _to_tokens(output, document_layout), None


def has_grouped_kernel(device_type: str, dtype: torch.dtype, head_size: int) -> bool:
    """Say whether a fused kernel takes fewer heads of keys than of queries; without one torch builds `[H, T, T]`.

    On CUDA only flash attention does, in 16 bits and up to 256 channels a head. The memory-efficient kernel, which
    takes float32 and wider heads, wants as many of each (`can_use_mem_efficient_attention` in torch's
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), and torch says nothing where it falls back.
    """
    return device_type != "cuda" or (dtype != torch.float32 and head_size <= 256)


def require_flash_attention() -> None:
    """Raise ConfigError where flash-attn is missing: transformers would fetch a kernel from a hub in its place."""
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        raise ConfigError(
            "train.attention = flash_attention_2 needs a GPU that torch sees, and the package flash-attn in the Python "
            "of the nodes: one of them is missing. Kernels are not fetched from a hub while a run starts. Install "
            "flash-attn for that torch, or set train.attention: sdpa, whose kernels come with torch."
        )


def _check_supported(
    attention_mask: Tensor | None, dropout: float, layout: DocumentLayout, options: dict[str, Any]
) -> None:
    window = options.get("sliding_window")
    refused = {
        "an attention mask": attention_mask is not None,
        f"dropout {dropout}": dropout > 0.0,
        f"a sliding window of {window} tokens": window is not None and window < layout.max_length,
    }
    refused |= {name: options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")}
    for what, present in refused.items():
        if present:
            raise ValueError(f"attention kernel {PACKED_SDPA} does not support {what}")


def _to_grid(heads: Tensor, layout: DocumentLayout) -> Tensor:
    """Turn `[1, H, T, D]` into `[N, H, Tmax, D]`."""
    tokens = heads[0].transpose(0, 1)
    grid = tokens if layout.to_grid is None else _Pad.apply(tokens, layout)
    return grid.reshape(layout.num_documents, layout.max_length, *tokens.shape[1:]).transpose(1, 2)


def _to_tokens(grid: Tensor, layout: DocumentLayout) -> Tensor:
    """Turn `[N, H, Tmax, D]` into `[1, T, H, D]`."""
    cells = grid.transpose(1, 2).flatten(0, 1)
    return (cells if layout.to_tokens is None else _Unpad.apply(cells, layout)).unsqueeze(0)


def register_packed_sdpa() -> None:
    """Make the kernel known to transformers by name.

    transformers builds masks only for kernels it knows a mask function for; none is registered here, so models
    pass `attention_mask=None` and nothing of size T x T exists.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
