"""Attention over packed documents that never sees across a document's border, and never builds a T x T mask.

Letters: `T` tokens of the microbatch, `H` heads, `D` a head's width. A document may continue another one, its prompt:
it attends to the prompt's tokens, then to its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from hpc_grpo.errors import ConfigError
from hpc_grpo.learner.sequence import exchanges_heads

PACKED_SDPA, PACKED_VARLEN = "packed_sdpa", "packed_varlen"

_CELLS_OF_A_CALL = {"cpu": 64**2, "cuda": 512**2}
"""The cost of one more kernel call, in scores that it could compute in that time: a guess of the right magnitude."""


@dataclass(frozen=True)
class Grid:
    """Documents of like lengths, right-padded to `length`.

    With `prompt`, an index into `DocumentLayout.prompt_lengths`, all of them continue that prompt.
    """

    num_rows: int
    length: int
    prompt: int | None = None


Gathering = tuple[Tensor, Tensor, Tensor | None]
"""What `_gather` takes: the row of the input for each row of the output, the same the other way, and a mask `[rows]`.

The mask marks rows of the input that reach no output that counts: they get no gradient.
"""


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Gathers rows of `[rows, H, D]` with a backward of its own, since index_add_ works row by row on CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, inverse: Tensor, missing: Tensor | None) -> Tensor:
        ctx.inverse, ctx.missing = inverse, missing
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        own = grad.index_select(0, ctx.inverse)
        if ctx.missing is not None:
            own.masked_fill_(ctx.missing.view(-1, 1, 1), 0.0)
        return own, None, None, None


def _gather(rows: Tensor, gathering: Gathering | None) -> Tensor:
    return rows if gathering is None else _Gather.apply(rows, *gathering)


@dataclass(frozen=True)
class DocumentLayout:
    """The grids, one after the other, and how tokens come there.

    `to_grids` and `to_tokens` gather the cells of all grids and back; None where the tokens already lie in that order.
    `to_prompts` gathers the tokens of all prompts, `prompt_lengths` each; None without prompts. `max_length` is that of
    the longest document with its prompt.
    """

    grids: tuple[Grid, ...]
    max_length: int
    to_grids: Gathering | None = None
    to_tokens: Gathering | None = None
    to_prompts: Gathering | None = None
    prompt_lengths: tuple[int, ...] = ()
    _masks: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def masks(self, window: int | None, like: Tensor) -> list[Tensor | None]:
        """Return for each grid what is added to its scores, of the type of `like`; None where causal attention will do.

        A mask `[length, prompt + length]` is 0 for the last `window` keys up to a query's own and -inf for all others.
        The layers of a forward pass share it.
        """
        window = min(window or self.max_length, self.max_length)
        if window not in self._masks:
            befores = [0 if grid.prompt is None else self.prompt_lengths[grid.prompt] for grid in self.grids]
            self._masks[window] = [
                _mask(grid.length, before, window, like) if before or window < grid.length else None
                for grid, before in zip(self.grids, befores, strict=True)
            ]
        return self._masks[window]

    def rows(self, heads: Tensor, *, with_prompts: bool = False) -> list[Tensor]:
        """Turn `[1, H, T, D]` into `[rows, H, length, D]` for each grid; `with_prompts`: before each row its prompt."""
        tokens = heads[0].transpose(0, 1)
        cells = _gather(tokens, self.to_grids)
        parts = cells.split([grid.num_rows * grid.length for grid in self.grids])
        prompts: Sequence[Tensor] = ()
        if with_prompts and self.to_prompts is not None:
            prompts = _gather(tokens, self.to_prompts).split(self.prompt_lengths)
        rows = []
        for grid, part in zip(self.grids, parts, strict=True):
            own = part.reshape(grid.num_rows, grid.length, *tokens.shape[1:])
            if prompts and grid.prompt is not None:
                prompt = prompts[grid.prompt]
                own = torch.cat([prompt.expand(len(own), *prompt.shape), own], dim=1)
            rows.append(own.transpose(1, 2))
        return rows

    def tokens(self, rows: Sequence[Tensor]) -> Tensor:
        """Turn `[rows, H, length, D]` of each grid into `[1, T, H, D]`."""
        cells = torch.cat([own.transpose(1, 2).flatten(0, 1) for own in rows])
        return _gather(cells, self.to_tokens).unsqueeze(0)


def _mask(length: int, before: int, window: int, like: Tensor) -> Tensor:
    """Return a mask of `length` queries, the first of which comes after `before` keys."""
    seen = torch.ones(length, before + length, dtype=torch.bool, device=like.device)
    seen = seen.tril_(before).triu_(before - window + 1)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def document_layout(lengths: Sequence[int], device: Any, prompts: Sequence[int | None] | None = None) -> DocumentLayout:
    """Lay out documents of `lengths`, one after the other; `prompts` has the document that each one continues."""
    sizes, of_documents = np.asarray(lengths, dtype=np.int64), prompts or [None] * len(lengths)
    num_tokens, starts = int(sizes.sum()), np.cumsum(sizes) - sizes
    used = sorted({each for each in of_documents if each is not None})
    grids, grid_cells, grid_real = [], [], []
    for prompt in (None, *used):
        before = 0 if prompt is None else int(sizes[prompt])
        own = np.array([index for index, each in enumerate(of_documents) if each == prompt], dtype=np.int64)
        own = own[np.argsort(-sizes[own], kind="stable")]
        for rows in _cut_by_length(own, sizes[own], before, _CELLS_OF_A_CALL[torch.device(device).type]):
            longest = int(sizes[rows[0]])
            grids.append(Grid(len(rows), longest, None if prompt is None else used.index(prompt)))
            column = np.arange(longest)
            is_real = column[None, :] < sizes[rows][:, None]
            grid_cells.append(np.where(is_real, starts[rows][:, None] + column, 0).reshape(-1))
            grid_real.append(is_real.reshape(-1))
    to_grids = to_tokens = to_prompts = None
    cells, real = np.concatenate(grid_cells), np.concatenate(grid_real)
    if len(cells) != num_tokens or (cells != np.arange(num_tokens)).any():
        places = np.empty(num_tokens, np.int64)
        places[cells[real]] = np.flatnonzero(real)
        index, inverse, missing = (_on(device, array) for array in (cells, places, ~real))
        # A padding cell comes after every token of its document, so causal attention gives it no gradient.
        to_grids, to_tokens = (index, inverse, None), (inverse, index, missing)
    if used:
        taken = np.concatenate([starts[each] + np.arange(sizes[each]) for each in used])
        places, unused = np.zeros(num_tokens, np.int64), np.ones(num_tokens, bool)
        places[taken], unused[taken] = np.arange(len(taken)), False
        to_prompts = (_on(device, taken), _on(device, places), _on(device, unused))
    befores = [0 if each is None else int(sizes[each]) for each in of_documents]
    longest, prompt_lengths = int((sizes + befores).max()), tuple(int(sizes[each]) for each in used)
    return DocumentLayout(tuple(grids), longest, to_grids, to_tokens, to_prompts, prompt_lengths)


def _cut_by_length(documents: Any, sizes: Any, before: int, cost_of_a_call: int) -> list[Any]:
    """Cut documents, the longest first, into runs of like lengths, so that padding and calls together cost least.

    A run of n documents of up to `m` tokens after `before` others costs n m (before + m) scores, and its call.
    """
    if not len(sizes):
        return []
    borders = np.flatnonzero(np.concatenate(([True], sizes[1:] != sizes[:-1])))
    ends = np.append(borders[1:], len(sizes))
    scores = sizes[borders] * (before + sizes[borders])
    best, first = np.zeros(len(ends) + 1, np.int64), np.zeros(len(ends), np.int64)
    for last, end in enumerate(ends):
        costs = best[: last + 1] + (end - borders[: last + 1]) * scores[: last + 1] + cost_of_a_call
        first[last] = costs.argmin()
        best[last + 1] = costs[first[last]]
    runs, last = [], len(ends) - 1
    while last >= 0:
        runs.append(documents[borders[first[last]] : ends[last]])
        last = int(first[last]) - 1
    return runs[::-1]


@dataclass(frozen=True)
class VarlenLayout:
    """The borders of documents for a kernel that takes their tokens as they lie, without padding.

    `query_borders` and `key_borders` `[N + 1]` int32 say where each document's queries and keys start, and where the
    last ones end; `most_queries` and `most_keys` are those of the longest. `keys` has the places of all keys, each
    document's prompt before its own; None where keys lie as queries do.
    """

    query_borders: Tensor
    key_borders: Tensor
    most_queries: int
    most_keys: int
    keys: Tensor | None = None


def varlen_layout(lengths: Sequence[int], device: Any, prompts: Sequence[int | None] | None = None) -> VarlenLayout:
    """Lay out documents of `lengths` as `document_layout` does, for a kernel without a grid."""
    borders = np.append(0, np.cumsum(np.asarray(lengths, dtype=np.int64)))
    queries, longest = _on(device, borders.astype(np.int32)), max(lengths)
    if prompts is None or all(prompt is None for prompt in prompts):
        return VarlenLayout(queries, queries, longest, longest)
    own = [np.arange(start, start + size) for start, size in zip(borders, lengths, strict=False)]
    keys = [
        each if prompt is None else np.concatenate([own[prompt], each])
        for each, prompt in zip(own, prompts, strict=True)
    ]
    num_keys = [len(each) for each in keys]
    key_borders = np.append(0, np.cumsum(num_keys)).astype(np.int32)
    return VarlenLayout(queries, _on(device, key_borders), longest, max(num_keys), _on(device, np.concatenate(keys)))


def _on(device: Any, array: Any) -> Tensor:
    """Copy an array to the device; from page-locked memory, for other copies wait until a GPU has done its work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


def packed_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend causally within each document of `packed_layout`, as transformers' AttentionInterface calls a kernel.

    `query` `[1, H, T, D]`, `key` and `value` `[1, Hkv, T, D]`; returns `[1, T, H, D]`. Documents are gathered into
    right-padded grids `[rows, H, length, D]`: with causal attention, padding on the right is seen by no real token, so
    no mask is needed and the fused kernels apply. Those that share a prompt have its keys before their own, and a mask
    of one document's size; so have those that are longer than a sliding window. Raises ConfigError without a layout,
    and for what this kernel does not compute.
    """
    layout: DocumentLayout = _layout("sdpa", module, attention_mask, options)
    masks = layout.masks(options.get("sliding_window"), query)
    num_sharing = query.shape[1] // key.shape[1]
    is_masked = any(mask is not None for mask in masks)
    if num_sharing > 1 and not has_grouped_kernel(query.device.type, query.dtype, query.shape[-1], is_masked=is_masked):
        key, value = (heads.repeat_interleave(num_sharing, dim=1) for heads in (key, value))
    queries = layout.rows(query)
    keys, values = (layout.rows(heads, with_prompts=True) for heads in (key, value))
    outputs = [
        functional.scaled_dot_product_attention(
            own_queries,
            own_keys,
            own_values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.get("scaling"),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for mask, own_queries, own_keys, own_values in zip(masks, queries, keys, values, strict=True)
    ]
    return layout.tokens(outputs), None


def packed_varlen(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend as `packed_sdpa` does, by torch's kernel for documents of any length, also within a sliding window.

    It is flash attention (`torch.nn.attention.varlen`), whose causal mask is aligned to the last query and the last
    key: a document that continues a prompt sees all of the prompt. Of a window of w tokens the first is w - 1 back.
    """
    from torch.nn.attention.varlen import varlen_attn

    layout: VarlenLayout = _layout("varlen", module, attention_mask, options)
    window = options.get("sliding_window")
    if value.shape[-1] != query.shape[-1]:
        raise ConfigError(
            f"train.attention = varlen takes values as wide as queries; those of model.path have {value.shape[-1]} and "
            f"{query.shape[-1]} channels a head. Set train.attention: sdpa."
        )
    queries, keys, values = (heads[0].transpose(0, 1) for heads in (query, key, value))
    if layout.keys is not None:
        # In float32: backward adds up what all completions want of their prompt, and would round each sum to 16 bits.
        keys, values = (own.float().index_select(0, layout.keys).to(query.dtype) for own in (keys, values))
    output = varlen_attn(
        *(queries, keys, values, layout.query_borders, layout.key_borders, layout.most_queries, layout.most_keys),
        scale=options.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unsqueeze(0), None


def has_grouped_kernel(device_type: str, dtype: torch.dtype, head_size: int, *, is_masked: bool = False) -> bool:
    """Say whether a fused kernel takes fewer heads of keys than of queries; without one torch builds `[H, T, T]`.

    On CUDA flash attention does, in 16 bits, up to 256 channels a head and without a mask. The memory-efficient kernel
    takes float32, wider heads and masks, but in some versions of torch no grouped heads
    (`can_use_mem_efficient_attention` in torch's sdp_utils.cpp). torch says nothing where it falls back.
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
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ConfigError(
            "train.attention = varlen needs a GPU that torch sees, of compute capability 8.0 (A100) or later. Set "
            "train.attention: sdpa."
        )


def register_kernels() -> None:
    """Make both kernels known to transformers by name, and switch cuDNN's attention off in this process.

    cuDNN makes a plan for each new shape, for about a second, and ragged documents have new shapes in every step.
    transformers builds masks only for kernels with a mask function: without one nothing of size T x T exists.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_SDPA, exchanges_heads(packed_sdpa))
    AttentionInterface.register(PACKED_VARLEN, exchanges_heads(packed_varlen))
    torch.backends.cuda.enable_cudnn_sdp(False)


def _layout(kernel: str, module: Any, attention_mask: Tensor | None, options: Mapping[str, Any]) -> Any:
    """Return the layout of the documents. Raises ConfigError without it, or for what the kernel does not compute."""
    if options.get("packed_layout") is None:
        raise ConfigError(
            f"model.path names a model whose attention, {type(module).__name__} of transformers, is not told where the "
            f"sequences packed into one row begin: its layers pass nothing on to their kernel. Take a model of another "
            f"architecture; Llama's, Qwen's, Mistral's and most others pass it on."
        )
    refused = {"an attention mask": attention_mask, f"dropout {options.get('dropout')}": options.get("dropout") or None}
    refused |= {name: options.get(name) for name in ("softcap", "s_aux", "position_bias")}
    for what, value in refused.items():
        if value is not None:
            raise _not_computed(kernel, what)
    return options["packed_layout"]


def _not_computed(kernel: str, what: str) -> ConfigError:
    return ConfigError(
        f"train.attention = {kernel} does not compute {what}, which the attention of model.path asks for. Set "
        f"train.attention: flash_attention_2, or take another model."
    )
