"""Attention over packed documents that never sees across a document's border, and never builds a T x T mask.

Letters: `T` tokens of the microbatch, `H` heads, `D` a head's width.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.layout import DocumentLayout, VarlenLayout

PACKED_SDPA, PACKED_VARLEN = "packed_sdpa", "packed_varlen"

_OLDEST_CAPABILITY = (8, 0)
_WIDEST_HEAD, _HEAD_STEP = 256, 8
_NEEDED_OF_VARLEN = {"window_size", "enable_gqa"}


def packed_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    document_layout: DocumentLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each document; the signature is that of transformers' AttentionInterface.

    `query` `[1, H, T, D]`, `key` and `value` `[1, Hkv, T, D]`; returns `[1, T, H, D]`. Documents are gathered into
    right-padded grids `[rows, H, length, D]`: with causal attention, padding on the right is seen by no real token, so
    no mask is needed and the fused kernels apply. Those that share a prompt have its keys before their own, and a mask
    of one document's size. Raises ConfigError without a layout, and for what this kernel does not compute.
    """
    if document_layout is None:
        raise _not_told(module)
    window = kwargs.get("sliding_window")
    is_within = window is None or window >= document_layout.max_length
    _check_supported("sdpa", attention_mask, dropout, kwargs, window=None if is_within else window)
    num_sharing = query.shape[1] // key.shape[1]
    is_masked = document_layout.to_prompts is not None
    if num_sharing > 1 and not has_grouped_kernel(query.device.type, query.dtype, query.shape[-1], is_masked=is_masked):
        key, value = (heads.repeat_interleave(num_sharing, dim=1) for heads in (key, value))
    queries = document_layout.rows(query)
    keys, values = (document_layout.rows(heads, with_prompts=True) for heads in (key, value))
    outputs = [
        functional.scaled_dot_product_attention(
            own_queries,
            own_keys,
            own_values,
            attn_mask=grid.mask,
            is_causal=grid.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for grid, own_queries, own_keys, own_values in zip(document_layout.grids, queries, keys, values, strict=True)
    ]
    return document_layout.tokens(outputs), None


def packed_varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    varlen_layout: VarlenLayout | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as `packed_sdpa` does, by torch's kernel for documents of any length, also within a sliding window.

    It is flash attention (`torch.nn.attention.varlen`), whose causal mask is aligned to the last query and the last
    key: a document that goes on from a prompt sees all of the prompt. Of a window of w tokens the first is w - 1 back.
    """
    from torch.nn.attention.varlen import varlen_attn

    if varlen_layout is None:
        raise _not_told(module)
    _check_supported("varlen", attention_mask, dropout, kwargs)
    if value.shape[-1] != query.shape[-1]:
        raise ConfigError(
            f"train.attention = varlen takes values as wide as queries; those of model.path have {value.shape[-1]} and "
            f"{query.shape[-1]} channels a head. Set train.attention: sdpa."
        )
    queries, keys, values = (heads[0].transpose(0, 1) for heads in (query, key, value))
    if varlen_layout.keys is not None:
        # In float32: backward adds up what all completions want of their prompt, and would round each sum to 16 bits.
        keys, values = (own.float().index_select(0, varlen_layout.keys).to(query.dtype) for own in (keys, values))
    output = varlen_attn(
        queries,
        keys,
        values,
        varlen_layout.query_borders,
        varlen_layout.key_borders,
        varlen_layout.most_queries,
        varlen_layout.most_keys,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unsqueeze(0), None


def has_grouped_kernel(device_type: str, dtype: torch.dtype, head_size: int, *, is_masked: bool = False) -> bool:
    """Say whether a fused kernel takes fewer heads of keys than of queries; without one torch builds `[H, T, T]`.

    On CUDA flash attention does, in 16 bits, up to 256 channels a head and without a mask. cuDNN's kernel does too, and
    is switched off (`register_kernels`). The memory-efficient kernel takes float32, wider heads and masks, but in some
    versions of torch no grouped heads (`can_use_mem_efficient_attention` in torch's
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). torch says nothing where it falls back.
    """
    return device_type != "cuda" or (dtype != torch.float32 and head_size <= 256 and not is_masked)


def require_flash_attention() -> None:
    """Raise ConfigError where flash-attn is missing: transformers would fetch a kernel from a hub in its place."""
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        raise ConfigError(
            "train.attention = flash_attention_2 needs a GPU that torch sees, and the package flash-attn in the Python "
            "of the nodes: one of them is missing. Kernels are not fetched from a hub while a run starts. Install "
            "flash-attn for that torch, or set train.attention: sdpa, whose kernels come with torch."
        )


def require_varlen_attention() -> None:
    """Raise ConfigError where torch's kernel for documents of any length does not run."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < _OLDEST_CAPABILITY:
        raise ConfigError(
            f"train.attention = varlen needs a GPU that torch sees, of compute capability {_OLDEST_CAPABILITY[0]}.0 "
            f"(A100) or later. Set train.attention: sdpa."
        )
    takes = _arguments_of_varlen()
    if not takes >= _NEEDED_OF_VARLEN:
        raise ConfigError(
            f"train.attention = varlen needs a torch whose torch.nn.attention.varlen.varlen_attn takes "
            f"{' and '.join(sorted(_NEEDED_OF_VARLEN))}; torch {torch.__version__} is older. Install a later one, or "
            f"set train.attention: sdpa."
        )


def _arguments_of_varlen() -> set[str]:
    """Return the names of the arguments of torch's kernel for documents of any length; none where torch lacks it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return set()
    return set(inspect.signature(varlen_attn).parameters)


def takes_varlen(head_size: int) -> bool:
    """Say whether torch's kernel for documents of any length takes heads of so many channels."""
    return head_size <= _WIDEST_HEAD and head_size % _HEAD_STEP == 0


def _not_told(module: Any) -> ConfigError:
    return ConfigError(
        f"model.path names a model whose attention, {type(module).__name__} of transformers, is not told where the "
        f"sequences packed into one row begin: its layers pass nothing on to their kernel. Take a model of another "
        f"architecture; Llama's, Qwen's, Mistral's and most others pass it on."
    )


def _check_supported(
    kernel: str,
    attention_mask: Tensor | None,
    dropout: float,
    options: dict[str, Any],
    *,
    window: int | None = None,
) -> None:
    """Raise ConfigError for what a kernel is asked for and does not compute; `window`: one that it does not."""
    refused = {
        "an attention mask": attention_mask is not None,
        f"dropout {dropout}": dropout > 0.0,
        f"a sliding window of {window} tokens": window is not None,
    }
    refused |= {name: options.get(name) is not None for name in ("softcap", "s_aux", "position_bias")}
    for what, present in refused.items():
        if present:
            raise ConfigError(
                f"train.attention = {kernel} does not compute {what}, which the attention of model.path asks for. Set "
                f"train.attention: flash_attention_2, or take another model."
            )


def register_kernels() -> None:
    """Make both kernels known to transformers by name, and switch cuDNN's attention off in this process.

    On Hopper torch prefers cuDNN, which makes a plan for each new shape, for about a second. Ragged documents have new
    shapes in every step.

    transformers builds masks only for kernels it knows a mask function for; none is registered here, so models
    pass `attention_mask=None` and nothing of size T x T exists.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_SDPA, packed_sdpa)
    AttentionInterface.register(PACKED_VARLEN, packed_varlen)
    torch.backends.cuda.enable_cudnn_sdp(False)
