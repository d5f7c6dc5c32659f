"""Packs sequences into microbatches: documents laid end to end, without padding, under a token budget.

Letters: `T` tokens of the microbatch, `N` documents, `C` trained tokens (where `loss_mask` holds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_grpo.types import TrainSequence


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch. All tensors lie on one device.

    `hidden[target_positions]` are the states that predict `target_ids`: those one token before each trained token.
    `mask` is 1.0 all over, or 0.0 in a microbatch that only fills up the count.
    """

    input_ids: Tensor
    """`[T]` int64."""
    position_ids: Tensor
    """`[T]` int64, from 0 in every document."""
    cu_seqlens: Tensor
    """`[N + 1]` int32: where documents start, and T."""
    target_positions: Tensor
    """`[C]` int64, positions in `[0, T)`."""
    target_ids: Tensor
    """`[C]` int64."""
    advantages: Tensor
    """`[C]` float32."""
    engine_logprobs: Tensor
    """`[C]` float32, nats; 0.0 where there was no engine."""
    policy_versions: Tensor
    """`[C]` float32, counts optimizer steps: of the weights that sampled the token; 0.0 where there was no engine."""
    sequence_ids: Tensor
    """`[C]` int64, each token's document, from 0."""
    draws: Tensor
    """`[C]` float32, uniform in [0, 1): a random number of the token's own, whatever it is packed with."""
    mask: Tensor
    """`[C]` float32."""
    document_lengths: tuple[int, ...]
    """N lengths in tokens; on the host, since kernels are chosen by them."""

    def to(self, device: Any) -> PackedBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def in_packed_order(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Order sequences by (ordinal, sample_index)."""
    return sorted(sequences, key=lambda sequence: (sequence.ordinal, sequence.sample_index))


def split_microbatches(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[TrainSequence]]:
    """Cut the sequences, `in_packed_order`, where the token budget is full.

    Next-fit in that fixed order, so equal sequences give equal microbatches whatever order they came in, and
    the sums over a microbatch are bit-identical. A sequence longer than `max_tokens` gets one of its own.
    """
    microbatches: list[list[TrainSequence]] = []
    num_tokens = max_tokens
    for sequence in in_packed_order(sequences):
        length = len(sequence.token_ids)
        if num_tokens + length > max_tokens:
            microbatches.append([])
            num_tokens = 0
        microbatches[-1].append(sequence)
        num_tokens += length
    return microbatches


def pack(sequences: Sequence[TrainSequence]) -> PackedBatch:
    """Lay sequences end to end.

    Raises ValueError for a sequence that trains no token, trains its first one (nothing predicts it), or has an array
    of another length than its tokens.
    """
    for sequence in sequences:
        _check(sequence)
    lengths = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    token_ids = np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)
    # A trained token at i is predicted by the state at i - 1, which is of the same document.
    targets = np.flatnonzero(np.concatenate([sequence.loss_mask for sequence in sequences]))
    document_of_token = np.repeat(np.arange(len(sequences)), lengths)
    return PackedBatch(
        input_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(np.arange(len(token_ids)) - starts[document_of_token]),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        target_positions=torch.from_numpy(targets - 1),
        target_ids=torch.from_numpy(token_ids[targets]),
        advantages=_at(targets, [sequence.advantages for sequence in sequences]),
        engine_logprobs=_at(targets, [sequence.engine_logprobs for sequence in sequences]),
        policy_versions=_at(targets, [_versions(sequence) for sequence in sequences]),
        sequence_ids=torch.from_numpy(document_of_token[targets]),
        draws=torch.from_numpy(np.concatenate([_draws(sequence) for sequence in sequences])[targets]),
        mask=torch.ones(len(targets)),
        document_lengths=tuple(lengths.tolist()),
    )


def pack_equalised(shares: Sequence[Sequence[TrainSequence]], max_tokens: int, device: Any) -> list[list[PackedBatch]]:
    """Pack each share into microbatches on the device; add weightless ones until all ranks have as many, at least one.

    A collective where there are several ranks.
    """
    packed = [[pack(group) for group in split_microbatches(share, max_tokens)] for share in shares]
    counts = torch.tensor([len(batches) for batches in packed], device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(counts, dist.ReduceOp.MAX)
    for batches, count in zip(packed, counts.tolist(), strict=True):
        batches += [zero_weight_batch()] * (max(count, 1) - len(batches))
    return [[batch.to(device) for batch in batches] for batches in packed]


def zero_weight_batch() -> PackedBatch:
    """Make a microbatch of one prompt token and one trained token with mask 0.0.

    It exists because ZeRO-2 and ZeRO-3 communicate in every microbatch: a rank with fewer of them would leave
    the others waiting.
    """
    zeros = np.zeros(2, np.float32)
    batch = pack([TrainSequence(0, 0, np.zeros(2, np.int32), np.array([False, True]), zeros, zeros)])
    return replace(batch, mask=torch.zeros_like(batch.mask))


def _draws(sequence: TrainSequence) -> Any:
    """Hash (ordinal, sample, position) of each token to [0, 1), `[L]` float32 (SplitMix64's finaliser, Steele 2014)."""
    state = (np.uint64(sequence.ordinal) << np.uint64(32)) + (np.uint64(sequence.sample_index) << np.uint64(20))
    mixed = state + np.arange(len(sequence.token_ids), dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


def _versions(sequence: TrainSequence) -> Any:
    return np.zeros(len(sequence.token_ids)) if sequence.policy_versions is None else sequence.policy_versions


def _at(targets: Any, arrays: Sequence[Any]) -> Tensor:
    """Take the trained tokens' values `[C]`, float32, of one array per document."""
    return torch.from_numpy(np.concatenate(arrays)[targets].astype(np.float32, copy=False))


def _check(sequence: TrainSequence) -> None:
    where = f"sequence (ordinal {sequence.ordinal}, sample {sequence.sample_index})"
    for name in ("loss_mask", "advantages", "engine_logprobs", "policy_versions"):
        values = getattr(sequence, name)
        if values is not None and len(values) != len(sequence.token_ids):
            raise ValueError(
                f"{where} has {len(sequence.token_ids)} tokens but {len(values)} {name}: give one per token"
            )
    if not sequence.loss_mask.any() or sequence.loss_mask[0]:
        raise ValueError(
            f"{where} trains {sequence.num_trained_tokens} of its {len(sequence.token_ids)} tokens: it needs at least "
            f"one, and a token before each to predict it from"
        )
