"""Attention over packed documents. Documents do not attend to each other, and no T x T mask is built.

Letters: `T` tokens of the microbatch, `H` heads, `D` a head's width. A completion may be a document that continues a
prompt, another document. Its tokens then attend to the prompt's tokens too.
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
"""The cost of one more kernel call, in attention scores computed in the same time. Only the magnitude is known."""


@dataclass(frozen=True)
class Grid:
    """Documents of similar lengths, right-padded to `length`.

    If `prompt`, an index into `DocumentLayout.prompt_lengths`, is not None, all documents continue that prompt.
    """

    num_rows: int
    length: int
    prompt: int | None = None


Gathering = tuple[Tensor, Tensor, Tensor | None]
"""Arguments of `_gather`: the input row of each output row, the output row of each input row, and a mask `[rows]`.

The mask is True for input rows that no output needs: they get no gradient.
"""


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Gathers rows of `[rows, H, D]`. Its backward replaces torch's index_add_, which works row by row on CPU."""

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
    """The grids of a microbatch, and the indices that move its tokens into the grids and back.

    `to_grids` gathers tokens into the cells of all grids, `to_tokens` gathers them back; None if the order is equal.
    `to_prompts` gathers the tokens of the shared prompts, whose lengths are `prompt_lengths`; None without prompts.
    `max_length` is the length of the longest document with its prompt.
    """

    grids: tuple[Grid, ...]
    max_length: int
    to_grids: Gathering | None = None
    to_tokens: Gathering | None = None
    to_prompts: Gathering | None = None
    prompt_lengths: tuple[int, ...] = ()
    _masks: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def masks(self, window: int | None, like: Tensor) -> list[Tensor | None]:
        """Return the mask added to the scores of each grid, in the type of `like`; None where `is_causal` is enough.

        A mask `[length, prompt + length]` is 0 for the last `window` keys up to the query's own, else -inf. All layers
        of a forward pass share the masks.
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
        """Turn `[1, H, T, D]` into `[rows, H, length, D]` of each grid. `with_prompts`: rows start with the prompt."""
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
    """Return the mask `[length, before + length]` of queries that follow `before` keys (`DocumentLayout.masks`)."""
    seen = torch.ones(length, before + length, dtype=torch.bool, device=like.device)
    seen = seen.tril_(before).triu_(before - window + 1)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


def document_layout(lengths: Sequence[int], device: Any, prompts: Sequence[int | None] | None = None) -> DocumentLayout:
    """Lay out documents of `lengths`. `prompts[i]` is the index of the document that document i continues, or None."""
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
        # Padding comes after the tokens of its document, so causal attention gives padding no gradient.
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
    """Cut documents, longest first, into runs of similar lengths, so that padding and calls together cost least.

    A run of n documents of up to `m` tokens after `before` tokens costs n m (before + m) scores, and a call.
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
    """The borders of N documents for a kernel without padding.

    `query_borders` and `key_borders` `[N + 1]` int32 are the starts of each document's queries and keys, and the end of
    the last document. `most_queries` and `most_keys` are the largest numbers in one document. `keys` has the positions
    of all keys, each document's prompt before its own keys; None if keys have the order of queries.
    """

    query_borders: Tensor
    key_borders: Tensor
    most_queries: int
    most_keys: int
    keys: Tensor | None = None


def varlen_layout(lengths: Sequence[int], device: Any, prompts: Sequence[int | None] | None = None) -> VarlenLayout:
    """Lay out documents for a kernel without padding. Takes the arguments of `document_layout`."""
    borders = np.append(0, np.cumsum(np.asarray(lengths, dtype=np.int64)))
    queries, longest = _on(device, borders.astype(np.int32)), max(lengths)
    if prompts is None or all(prompt is None for prompt in prompts):
        return VarlenLayout(queries, queries, longest, longest)
    own = [np.arange(start, start + size) for start, size in zip(borders, lengths, strict=False)]
    pairs = zip(own, prompts, strict=True)
    keys = [each if prompt is None else np.concatenate([own[prompt], each]) for each, prompt in pairs]
    num_keys = [len(each) for each in keys]
    key_borders = np.append(0, np.cumsum(num_keys)).astype(np.int32)
    return VarlenLayout(queries, _on(device, key_borders), longest, max(num_keys), _on(device, np.concatenate(keys)))


def _on(device: Any, array: Any) -> Tensor:
    """Copy an array to the device. The copy from page-locked memory does not wait for the GPU's earlier work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


def packed_sdpa(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attend causally within each document of the option `packed_layout`. For transformers' AttentionInterface.

    `query` `[1, H, T, D]`, `key` and `value` `[1, Hkv, T, D]`; returns `[1, T, H, D]`. Documents are gathered into
    right-padded grids `[rows, H, length, D]`. In causal attention no real token sees padding on its right, so no mask
    is needed and the fused kernels apply. A mask of one document's size is needed for documents that continue a prompt
    or exceed a sliding window. Raises ConfigError without a layout, and for options that this kernel does not compute.
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
    """Compute what `packed_sdpa` computes, with torch's kernel for documents of different lengths.

    The kernel is flash attention (`torch.nn.attention.varlen`). Its causal mask is aligned to the last query and the
    last key: a document that continues a prompt sees the complete prompt. A window of w tokens ends at the query.
    """
    from torch.nn.attention.varlen import varlen_attn

    layout: VarlenLayout = _layout("varlen", module, attention_mask, options)
    window = options.get("sliding_window")
    if value.shape[-1] != query.shape[-1]:
        raise ConfigError(
            f"train.attention = varlen needs values as wide as queries. The heads of model.path have {value.shape[-1]} "
            f"and {query.shape[-1]} channels. Set train.attention: sdpa."
        )
    queries, keys, values = (heads[0].transpose(0, 1) for heads in (query, key, value))
    if layout.keys is not None:
        # Gather in float32: backward sums the gradients of all completions at their prompt, and 16 bits would round.
        keys, values = (own.float().index_select(0, layout.keys).to(query.dtype) for own in (keys, values))
    output = varlen_attn(
        *(queries, keys, values, layout.query_borders, layout.key_borders, layout.most_queries, layout.most_keys),
        scale=options.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unsqueeze(0), None


def has_grouped_kernel(device_type: str, dtype: torch.dtype, head_size: int, *, is_masked: bool = False) -> bool:
    """Return whether a fused kernel accepts fewer key heads than query heads. Without one, torch builds `[H, T, T]`.

    On CUDA, flash attention accepts them in 16 bits, up to 256 channels per head, without a mask. The memory-efficient
    kernel accepts float32, wider heads and masks, but in some versions of torch no grouped heads
    (`can_use_mem_efficient_attention` in torch's sdp_utils.cpp). torch falls back silently.
    """
    return device_type != "cuda" or (dtype != torch.float32 and head_size <= 256 and not is_masked)


def require_flash_attention() -> None:
    """Raise ConfigError if flash-attn is missing: transformers would download a kernel from a hub instead."""
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        raise ConfigError(
            "train.attention = flash_attention_2 needs a GPU that torch sees, and the package flash-attn in the Python "
            "of the nodes. One of them is missing. Kernels are not downloaded while a run starts. Install flash-attn "
            "for that torch, or set train.attention: sdpa, whose kernels are part of torch."
        )


def require_varlen_attention() -> None:
    """Raise ConfigError if torch's variable-length attention cannot run on this machine."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
        raise ConfigError(
            "train.attention = varlen needs a GPU that torch sees, of compute capability 8.0 (A100) or later. Set "
            "train.attention: sdpa."
        )


def register_kernels(*, exchanges: bool = False) -> None:
    """Register both kernels with transformers by name. Switch off cuDNN's attention. `exchanges`: exchange the heads.

    cuDNN plans each new shape for about a second, and packed documents have new shapes in every step. transformers
    builds T x T masks only for kernels with a mask function. These kernels have none.
    """
    from transformers import AttentionInterface

    for name, kernel in ((PACKED_SDPA, packed_sdpa), (PACKED_VARLEN, packed_varlen)):
        AttentionInterface.register(name, exchanges_heads(kernel) if exchanges else kernel)
    torch.backends.cuda.enable_cudnn_sdp(False)


def _layout(kernel: str, module: Any, attention_mask: Tensor | None, options: Mapping[str, Any]) -> Any:
    """Return the layout of the documents. Raises ConfigError without a layout, or for options that the kernel lacks."""
    if options.get("packed_layout") is None:
        raise ConfigError(
            f"model.path: the attention {type(module).__name__} of transformers does not receive the borders of "
            f"sequences in a packed row, because its layers pass no options to their kernel. Use a model of another "
            f"architecture, such as Llama, Qwen or Mistral."
        )
    refused = {"an attention mask": attention_mask, f"dropout {options.get('dropout')}": options.get("dropout") or None}
    refused |= {name: options.get(name) for name in ("softcap", "s_aux", "position_bias")}
    for what, value in refused.items():
        if value is not None:
            raise ConfigError(
                f"train.attention = {kernel} does not compute {what}, which the attention of model.path needs. Set "
                f"train.attention: flash_attention_2, or use another model."
            )
    return options["packed_layout"]
