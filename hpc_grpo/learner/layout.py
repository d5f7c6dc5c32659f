"""Lay a microbatch's tokens out for attention: in grids cut by length, a document a row, or as they lie.

Letters: `T` tokens of the microbatch, `H` heads, `D` a head's width. A document may have another one for its prompt: it
attends to that one's tokens, then to its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_CELLS_OF_A_CALL = {"cpu": 64**2, "cuda": 512**2}
"""The cost of one more kernel call, in scores that it could compute meanwhile: a guess of the right magnitude."""


@dataclass(frozen=True)
class Grid:
    """Hold documents of like lengths, right-padded to `length`.

    With `prompt`, its place among `DocumentLayout.prompt_lengths`, all of them go on from that prompt; `mask`
    `[length, prompt + length]` then adds 0 to the scores that a query may see, and -inf to those after it.
    """

    num_rows: int
    length: int
    prompt: int | None = None
    mask: Tensor | None = None


@dataclass(frozen=True)
class Gathering:
    """Take rows `index` of a tensor `[rows, H, D]`, in both directions of autograd.

    `inverse` is the row of the result that each row went to, for the backward pass; where `missing`, it went nowhere
    that counts and gets no gradient.
    """

    index: Tensor
    inverse: Tensor
    missing: Tensor | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        return _Gather.apply(rows, self)


class _Gather(torch.autograd.Function):  # type: ignore[misc]
    """Gather rows with a backward of its own, since index_add_ works row by row on CPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gathering: Gathering) -> Tensor:
        ctx.gathering = gathering
        return rows.index_select(0, gathering.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        missing, own = ctx.gathering.missing, grad.index_select(0, ctx.gathering.inverse)
        return own if missing is None else own.masked_fill_(missing.view(-1, *(1,) * (grad.dim() - 1)), 0.0), None


@dataclass(frozen=True)
class DocumentLayout:
    """The grids, one after the other, and how tokens come there.

    `to_grids` and `to_tokens` gather the cells of all grids and back; None where the tokens lie so already.
    `to_prompts` gathers the tokens of all prompts, `prompt_lengths` each; None without prompts. `max_length` is that of
    the longest document with its prompt.
    """

    grids: tuple[Grid, ...]
    max_length: int
    to_grids: Gathering | None = None
    to_tokens: Gathering | None = None
    to_prompts: Gathering | None = None
    prompt_lengths: tuple[int, ...] = ()

    def rows(self, heads: Tensor, *, with_prompts: bool = False) -> list[Tensor]:
        """Turn `[1, H, T, D]` into `[rows, H, length, D]` for each grid; `with_prompts` come before each row's own."""
        tokens = heads[0].transpose(0, 1)
        cells = tokens if self.to_grids is None else self.to_grids(tokens)
        sizes = [grid.num_rows * grid.length for grid in self.grids]
        shapes = [(grid.num_rows, grid.length, *tokens.shape[1:]) for grid in self.grids]
        rows = [own.reshape(shape) for own, shape in zip(cells.split(sizes), shapes, strict=True)]
        if with_prompts and self.to_prompts is not None:
            prompts = self.to_prompts(tokens).split(self.prompt_lengths)
            rows = [
                own if grid.prompt is None else _after(prompts[grid.prompt], own)
                for own, grid in zip(rows, self.grids, strict=True)
            ]
        return [own.transpose(1, 2) for own in rows]

    def tokens(self, rows: Sequence[Tensor]) -> Tensor:
        """Turn `[rows, H, length, D]` of each grid into `[1, T, H, D]`."""
        cells = torch.cat([own.transpose(1, 2).flatten(0, 1) for own in rows])
        return (cells if self.to_tokens is None else self.to_tokens(cells)).unsqueeze(0)


def document_layout(
    lengths: Sequence[int],
    device: Any,
    prompts: Sequence[int | None] | None = None,
    dtype: torch.dtype = torch.float32,
) -> DocumentLayout:
    """Lay out documents of `lengths` that come one after the other; `prompts` has the document that each goes on from.

    `dtype` is that of the heads, for masks.
    """
    sizes, of_documents = np.asarray(lengths, dtype=np.int64), prompts or [None] * len(lengths)
    starts = np.cumsum(sizes) - sizes
    used = sorted({each for each in of_documents if each is not None})
    grids, cells, real = [], [], []
    for prompt in (None, *used):
        before = 0 if prompt is None else int(sizes[prompt])
        own = np.array([index for index, each in enumerate(of_documents) if each == prompt], dtype=np.int64)
        own = own[np.argsort(-sizes[own], kind="stable")]
        for rows in _cut_by_length(own, sizes[own], before, _CELLS_OF_A_CALL[torch.device(device).type]):
            longest = int(sizes[rows[0]])
            if prompt is None:
                grids.append(Grid(len(rows), longest))
            else:
                grids.append(Grid(len(rows), longest, used.index(prompt), _mask(longest, before, dtype, device)))
            column = np.arange(longest)
            is_real = column[None, :] < sizes[rows][:, None]
            cells.append(np.where(is_real, starts[rows][:, None] + column, 0).reshape(-1))
            real.append(is_real.reshape(-1))
    num_tokens = int(sizes.sum())
    to_grids, to_tokens = _gatherings(np.concatenate(cells), np.concatenate(real), num_tokens, device)
    befores = [0 if each is None else int(sizes[each]) for each in of_documents]
    return DocumentLayout(
        grids=tuple(grids),
        max_length=int((sizes + befores).max()),
        to_grids=to_grids,
        to_tokens=to_tokens,
        to_prompts=_prompt_gathering(starts[used], sizes[used], num_tokens, device) if used else None,
        prompt_lengths=tuple(sizes[used].tolist()) if used else (),
    )


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
    sizes, of_documents = np.asarray(lengths, dtype=np.int64), prompts or [None] * len(lengths)
    borders = np.append(0, np.cumsum(sizes))
    queries = _on(device, borders.astype(np.int32))
    if not any(each is not None for each in of_documents):
        return VarlenLayout(queries, queries, int(sizes.max()), int(sizes.max()))
    places = [np.arange(start, start + size) for start, size in zip(borders, sizes, strict=False)]
    keys = [
        own if prompt is None else np.concatenate([places[prompt], own])
        for own, prompt in zip(places, of_documents, strict=True)
    ]
    num_keys = np.array([len(own) for own in keys])
    key_borders = np.append(0, np.cumsum(num_keys)).astype(np.int32)
    return VarlenLayout(
        query_borders=queries,
        key_borders=_on(device, key_borders),
        most_queries=int(sizes.max()),
        most_keys=int(num_keys.max()),
        keys=_on(device, np.concatenate(keys)),
    )


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


def _mask(length: int, before: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Return what causal attention adds to the scores `[length, before + length]`: the last query sees all keys."""
    return torch.full((length, before + length), -torch.inf, dtype=dtype, device=device).triu_(before + 1)


def _gatherings(cells: Any, is_real: Any, num_tokens: int, device: Any) -> tuple[Gathering | None, Gathering | None]:
    """Return the ways to the grids' cells and back; `cells` holds the token of each, any where it is padding."""
    if len(cells) == num_tokens and (cells == np.arange(num_tokens)).all():
        return None, None
    places = np.empty(num_tokens, np.int64)
    places[cells[is_real]] = np.flatnonzero(is_real)
    index, inverse, missing = (_on(device, array) for array in (cells, places, ~is_real))
    # A padding cell comes after every token of its document, so causal attention gives it no gradient.
    return Gathering(index, inverse), Gathering(inverse, index, missing)


def _prompt_gathering(starts: Any, sizes: Any, num_tokens: int, device: Any) -> Gathering:
    index = np.concatenate([start + np.arange(size) for start, size in zip(starts, sizes, strict=True)])
    inverse, missing = np.zeros(num_tokens, np.int64), np.ones(num_tokens, bool)
    inverse[index], missing[index] = np.arange(len(index)), False
    return Gathering(*(_on(device, array) for array in (index, inverse, missing)))


def _on(device: Any, array: Any) -> Tensor:
    """Copy an array to the device; from page-locked memory, for other copies wait until a GPU has done its work."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else tensor


def _after(prompt: Tensor, own: Tensor) -> Tensor:
    """Put a prompt `[P, H, D]` before each row of `[rows, length, H, D]`."""
    return torch.cat([prompt.expand(len(own), *prompt.shape), own], dim=1)
