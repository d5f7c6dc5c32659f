"""Sequence parallel (DeepSpeed-Ulysses, arXiv:2309.14509): N learners share a packed row, each with a slice of it.

    slice [T/N] -> layers -> queries, keys, values of T/N tokens, H heads
                             all-to-all: T tokens, H/N heads -> attention of packed documents -> all-to-all
                -> states [T/N, D] -> head at the slice's own targets -> sum over the group -> logprobs [C]

All learners of a group pack the same row and get the logprobs of its C targets. Losses, metrics and learner parts
therefore need no change. A learner computes the gradient's terms of its slice. Data parallelism sums these terms over
all learners. DeepSpeed does not know about the groups, and shards over all learners.

DeepSpeed's `UlyssesSPAttentionHF` is not used, for three reasons. It holds the head counts of one model per process,
but critic, reference and teacher may differ. It gathers position ids in each layer. It needs DeepSpeed's
`sequence_parallel_size`, and then ZeRO-3 returns only a share of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hpc_grpo.learner.group import COLLECTIVE_TIMEOUT
from hpc_grpo.learner.packing import PackedBatch

Kernel = Callable[..., tuple[Tensor, None]]
"""The signature of transformers' AttentionInterface: module, query, key, value, mask, options."""


class _AllToAll(torch.autograd.Function):  # type: ignore[misc]
    """Sends row i of `[N, ...]` to rank i of the group, and receives row i from it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.forward(ctx, grad, ctx.group), None


class _Sum(torch.autograd.Function):  # type: ignore[misc]
    """Sums over the group. Every rank computes the loss of the sum, so a term's gradient is that of the sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class SequenceGroup:
    """The `size` learners of neighbouring ranks that share rows. This learner has slice `rank`."""

    def __init__(self, size: int) -> None:
        """Create the groups of all learners; `size` divides their number. A collective."""
        firsts = range(0, dist.get_world_size(), size)
        groups = [dist.new_group(list(range(at, at + size)), timeout=COLLECTIVE_TIMEOUT) for at in firsts]
        self.size, self.rank, self._group = size, dist.get_rank() % size, groups[dist.get_rank() // size]

    def slice_of(self, batch: PackedBatch) -> tuple[PackedBatch, Tensor]:
        """Return this rank's slice with its targets, and their positions `[C']` in the row's targets `[C]`.

        `document_lengths` and `prompts` stay those of the row. One more document pads the row to a multiple of N.
        """
        missing = -len(batch.input_ids) % self.size
        token_ids, position_ids = self.own_tokens(batch.input_ids), self.own_tokens(batch.position_ids)
        length = len(token_ids)
        start = self.rank * length
        places = (batch.target_positions // length == self.rank).nonzero().squeeze(1)
        own = replace(
            batch,
            input_ids=token_ids,
            position_ids=position_ids,
            experts=None if batch.experts is None else self.own_tokens(batch.experts),
            target_positions=batch.target_positions[places] - start,
            target_ids=batch.target_ids[places],
            document_lengths=batch.document_lengths + (missing,) * bool(missing),
            prompts=batch.prompts + (None,) * bool(missing),
        )
        return own, places

    def own_tokens(self, values: Tensor, filler: int = 0) -> Tensor:
        """Return this rank's slice `[T/N, …]` of a row's values `[T, …]`, padded at the end with `filler`."""
        missing = (0, 0) * (values.dim() - 1) + (0, -len(values) % self.size)
        return functional.pad(values, missing, value=filler).chunk(self.size)[self.rank]

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the group, with gradient for this rank's `values`. A collective."""
        return _Sum.apply(values, self._group)

    def whole(self, values: Tensor, places: Tensor, num_targets: int) -> Tensor:
        """Return the row's values `[C]` on every rank, from this rank's `[C']` at `places`. A collective."""
        return self.sum(values.new_zeros(num_targets).index_put((places,), values))

    def to_heads(self, *slices: Tensor) -> list[Tensor]:
        """Turn each `[1, H, T/N, D]` of all heads into `[1, H/N, T, D]` of all tokens, in one exchange."""
        shapes = [(self.size, own.shape[1] // self.size, *own.shape[2:]) for own in slices]
        sent = torch.cat([own.reshape(self.size, -1) for own in slices], dim=1)
        received = _AllToAll.apply(sent, self._group).split([own.numel() // self.size for own in slices], dim=1)
        return [
            own.reshape(shape).transpose(0, 1).reshape(1, shape[1], -1, shape[3])
            for own, shape in zip(received, shapes, strict=True)
        ]

    def to_slice(self, output: Tensor) -> Tensor:
        """Turn `[1, T, H/N, D]` back into `[1, T/N, H, D]`."""
        rows = output.reshape(self.size, -1, *output.shape[2:])
        received = _AllToAll.apply(rows, self._group).transpose(0, 1)
        return received.reshape(1, rows.shape[1], -1, output.shape[3])


@cache
def sequence_group(size: int) -> SequenceGroup | None:
    """Return this process's group of `train.sequence_parallel` learners; None for 1. The first call is a collective."""
    return SequenceGroup(size) if size > 1 else None


def exchanges_heads(kernel: Kernel) -> Kernel:
    """Let `kernel` attend over all tokens of the row if the option `sequence_group` is set."""

    @wraps(kernel)
    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        group: SequenceGroup | None = options.get("sequence_group")
        if group is None:
            return kernel(module, query, key, value, attention_mask, **options)
        output, weights = kernel(module, *group.to_heads(query, key, value), attention_mask, **options)
        return group.to_slice(output), weights

    return attend
