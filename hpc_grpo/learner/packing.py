"""From sequences to microbatches: documents laid end to end, without padding, under a token budget.

Tensors are built with numpy in one pass per microbatch; nothing here works sequence by sequence in torch.
Letters: `T` tokens of the microbatch, `N` documents, `C` completion tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_grpo.types import TrainSequence


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch. All tensors lie on one device.

    `hidden[target_positions]` are the states that predict `target_ids`: those one token before each completion
    token. `mask` is 1.0 for a completion token, 0.0 in a microbatch that only fills up the count.
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
    mask: Tensor
    """`[C]` float32."""
    document_lengths: tuple[int, ...]
    """N lengths in tokens; on the host, since kernels are chosen by them."""

    def to(self, device: Any) -> PackedBatch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: value.to(device) for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


def split_microbatches(sequences: Sequence[TrainSequence], max_tokens: int) -> list[list[TrainSequence]]:
    """Order sequences by (ordinal, sample_index) and cut the order where the token budget is full.

    Next-fit in that fixed order, so equal sequences give equal microbatches whatever order they came in, and
    the sums over a microbatch are bit-identical. A sequence longer than `max_tokens` gets one of its own.
    """
    ordered = sorted(sequences, key=lambda sequence: (sequence.ordinal, sequence.sample_index))
    microbatches: list[list[TrainSequence]] = []
    num_tokens = max_tokens
    for sequence in ordered:
        length = len(sequence.token_ids)
        if num_tokens + length > max_tokens:
            microbatches.append([])
            num_tokens = 0
        microbatches[-1].append(sequence)
        num_tokens += length
    return microbatches


def pack(sequences: Sequence[TrainSequence]) -> PackedBatch:
    """Lay sequences end to end.

    Raises ValueError for a sequence whose completion is empty or leaves no prompt token to predict it from, or
    whose engine_logprobs are neither empty nor as long as its completion.
    """
    lengths = np.array([len(sequence.token_ids) for sequence in sequences], dtype=np.int64)
    completions = np.array([sequence.num_completion_tokens for sequence in sequences], dtype=np.int64)
    _check(sequences, lengths, completions)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    token_ids = np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)
    # A completion token at i is predicted by the state at i - 1; both are ranges, laid out for all documents at once.
    targets = _ranges(starts[1:] - completions, completions)
    advantages = np.array([sequence.advantage for sequence in sequences], dtype=np.float32)
    return PackedBatch(
        input_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(_ranges(np.zeros_like(lengths), lengths)),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        target_positions=torch.from_numpy(targets - 1),
        target_ids=torch.from_numpy(token_ids[targets]),
        advantages=torch.from_numpy(np.repeat(advantages, completions)),
        engine_logprobs=torch.from_numpy(np.concatenate([_engine_logprobs(s) for s in sequences])),
        mask=torch.ones(len(targets)),
        document_lengths=tuple(lengths.tolist()),
    )


def zero_weight_batch() -> PackedBatch:
    """A microbatch of one prompt and one completion token with mask 0.0.

    It exists because ZeRO-2 and ZeRO-3 communicate in every microbatch: a rank with fewer of them would leave
    the others waiting.
    """
    sequence = TrainSequence(0, 0, np.zeros(2, np.int32), 1, np.zeros(0, np.float32), 0.0)
    batch = pack([sequence])
    return replace(batch, mask=torch.zeros_like(batch.mask))


def _check(sequences: Sequence[TrainSequence], lengths: Any, completions: Any) -> None:
    wrong = np.flatnonzero((completions < 1) | (completions >= lengths))
    if wrong.size:
        sequence = sequences[int(wrong[0])]
        raise ValueError(
            f"sequence (ordinal {sequence.ordinal}, sample {sequence.sample_index}) has {len(sequence.token_ids)} "
            f"tokens of which {sequence.num_completion_tokens} completion: it needs at least one of each kind"
        )


def _engine_logprobs(sequence: TrainSequence) -> Any:
    given = sequence.engine_logprobs
    if len(given) == 0:
        return np.zeros(sequence.num_completion_tokens, dtype=np.float32)
    if len(given) != sequence.num_completion_tokens:
        raise ValueError(
            f"sequence (ordinal {sequence.ordinal}, sample {sequence.sample_index}) has "
            f"{sequence.num_completion_tokens} completion tokens but {len(given)} engine_logprobs"
        )
    return np.asarray(given, dtype=np.float32)


def _ranges(starts: Any, lengths: Any) -> Any:
    """[starts[0] .. starts[0] + lengths[0]), then the next, concatenated `[sum(lengths)]`."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
