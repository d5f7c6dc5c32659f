"""Pack sequences into microbatches: documents end to end, without padding, and a shared prompt once.

A document is a sequence. If sequences share a prompt, the prompt is a document, and so is the rest of each sequence.
Letters: `T` tokens of the microbatch, `N` documents, `C` trained tokens (where `loss_mask` holds).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_grpo.config.resources import Budget
from hpc_grpo.learner.split import shared_length, split_microbatches
from hpc_grpo.types import TrainSequence


@dataclass(frozen=True)
class PromptImages:
    """A prompt's images and tokens `[P]`. `places[i]` are the row positions of the tokens of its sequence i."""

    images: tuple[bytes, ...]
    token_ids: Any
    places: list[Any]


@dataclass(frozen=True)
class PackedBatch:
    """One microbatch. All tensors are on one device.

    `hidden[target_positions]` are the states that predict `target_ids`, one token before each trained token. `mask` is
    1.0 everywhere, or 0.0 everywhere in a filler (`pack_equalised`).
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, from 0 in every sequence
    cu_seqlens: Tensor  # [N + 1] int32: where documents start, and T
    target_positions: Tensor  # [C] int64, positions in [0, T)
    target_ids: Tensor  # [C] int64
    advantages: Tensor  # [C] float32
    engine_logprobs: Tensor  # [C] float32, nats; 0.0 without an engine
    policy_versions: Tensor  # [C] float32, optimizer steps of the weights that sampled the token; 0.0 without an engine
    sequence_ids: Tensor  # [C] int64, each token's sequence, from 0
    draws: Tensor  # [C] float32, uniform in [0, 1): a random number per token, independent of the packing
    mask: Tensor  # [C] float32
    document_lengths: tuple[int, ...]  # N lengths in tokens; on the host, where layouts are made
    prompts: tuple[int | None, ...]  # N, on the host: the index of the document that each document continues
    prompts_with_images: tuple[PromptImages, ...] = ()
    experts: Tensor | None = None  # [T, layers, k] uint8 or uint16: the engine's experts (train.router_replay)

    def to(self, device: Any) -> PackedBatch:
        return replace(self, **{name: own.to(device) for name, own in vars(self).items() if isinstance(own, Tensor)})


def pack(sequences: Sequence[TrainSequence], *, shares_prompts: bool = False) -> PackedBatch:
    """Lay sequences end to end. With `shares_prompts`, neighbours of one ordinal store their common prompt once.

    Raises ValueError for a sequence that trains no token or its first token (nothing predicts it), or whose arrays have
    other lengths than its tokens.
    """
    for sequence in sequences:
        num_tokens = len(sequence.token_ids)
        where = f"sequence (ordinal {sequence.ordinal}, sample {sequence.sample_index})"
        for name in ("loss_mask", "advantages", "engine_logprobs", "policy_versions", "experts"):
            values = getattr(sequence, name)
            if values is not None and len(values) != num_tokens:
                raise ValueError(f"{where} has {num_tokens} tokens but {len(values)} {name}: give one per token")
        if not sequence.loss_mask.any() or sequence.loss_mask[0]:
            raise ValueError(
                f"{where} trains {sequence.num_trained_tokens} of its {num_tokens} tokens: at least one must be "
                f"trained, but not the first, which no token predicts"
            )
    documents: list[tuple[int, int | None]] = []  # length, and the document that it continues
    places, start = [], 0  # positions of each sequence's tokens in the microbatch
    groups = [[sequence] for sequence in sequences]
    if shares_prompts:
        groups = [list(own) for _, own in groupby(sequences, key=attrgetter("ordinal"))]
    for group in groups:
        shared = shared_length(group)
        prompt, index = np.arange(start, start + shared), len(documents) if shared else None
        if shared:
            documents.append((shared, None))
            start += shared
        for sequence in group:
            length = len(sequence.token_ids) - shared
            documents.append((length, index))
            places.append(np.concatenate([prompt, np.arange(start, start + length)]))
            start += length
    cu_seqlens = np.cumsum((0, *(length for length, _ in documents)))
    token_ids, position_ids = np.empty((2, start), np.int64)
    of_sequences = np.concatenate([sequence.token_ids for sequence in sequences]).astype(np.int64)
    all_places = np.concatenate(places)
    token_ids[all_places] = of_sequences
    position_ids[all_places] = np.concatenate([np.arange(len(own)) for own in places])
    # The state at i - 1, in the same sequence, predicts a trained token at i.
    targets = np.flatnonzero(np.concatenate([sequence.loss_mask for sequence in sequences]))
    sequence_of_token = np.repeat(np.arange(len(sequences)), [len(own) for own in places])

    def at_targets(arrays: Sequence[Any]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)[targets].astype(np.float32, copy=False))

    versions = [own.policy_versions for own in sequences]
    return PackedBatch(
        input_ids=torch.from_numpy(token_ids),
        position_ids=torch.from_numpy(position_ids),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        target_positions=torch.from_numpy(all_places[targets - 1]),
        target_ids=torch.from_numpy(of_sequences[targets]),
        advantages=at_targets([own.advantages for own in sequences]),
        engine_logprobs=at_targets([own.engine_logprobs for own in sequences]),
        policy_versions=at_targets(
            [np.zeros(len(at)) if own is None else own for own, at in zip(versions, places, strict=True)]
        ),
        sequence_ids=torch.from_numpy(sequence_of_token[targets]),
        draws=at_targets([_draws(own) for own in sequences]),
        mask=torch.ones(len(targets)),
        document_lengths=tuple(length for length, _ in documents),
        prompts=tuple(prompt for _, prompt in documents),
        prompts_with_images=_prompts_with_images(sequences, places),
        experts=_experts(sequences, all_places, start),
    )


def _experts(sequences: Sequence[TrainSequence], places: Any, num_tokens: int) -> Tensor | None:
    """Return the row's experts, None if a sequence has none. A shared prompt has those of its first sequence."""
    columns = [own.experts for own in sequences if own.experts is not None]
    if len(columns) < len(sequences):
        return None
    of_row = np.empty((num_tokens, *columns[0].shape[1:]), columns[0].dtype)
    of_row[places[::-1]] = np.concatenate(columns)[::-1]  # of equal places, numpy keeps the last
    return torch.from_numpy(of_row)


def _prompts_with_images(sequences: Sequence[TrainSequence], places: Sequence[Any]) -> tuple[PromptImages, ...]:
    found: dict[int, PromptImages] = {}
    for sequence, own in zip(sequences, places, strict=True):
        if sequence.images:
            prompt = sequence.token_ids[: sequence.loss_mask.argmax()]
            found.setdefault(sequence.ordinal, PromptImages(sequence.images, prompt, [])).places.append(own)
    return tuple(found.values())


def pack_equalised(
    shares: Sequence[Sequence[TrainSequence]], budget: Budget, device: Any
) -> list[tuple[list[PackedBatch], list[TrainSequence]]]:
    """Pack each share into microbatches on the device. Return each share's microbatches and its sequences, reordered.

    The sequences have the order of the packed tokens. A collective: all ranks get the same number of microbatches,
    because ZeRO-2 and 3 communicate in each. Fillers with mask 0.0 complete the number.
    """
    counts = torch.tensor([len(split_microbatches(share, budget)) for share in shares], device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(counts, dist.ReduceOp.MAX)
    packed = []
    for share, count in zip(shares, counts.tolist(), strict=True):
        groups = split_microbatches(share, budget, at_least=count)
        batches = [pack(group, shares_prompts=budget.shares_prompts) for group in groups]
        batches += [zero_weight_batch()] * (max(count, 1) - len(batches))
        packed.append(([batch.to(device) for batch in batches], [own for group in groups for own in group]))
    return packed


def zero_weight_batch() -> PackedBatch:
    """Return a filler: a microbatch of one prompt token and one trained token, with mask 0.0."""
    zeros = np.zeros(2, np.float32)
    batch = pack([TrainSequence(0, 0, np.zeros(2, np.int32), np.array([False, True]), zeros, zeros)])
    return replace(batch, mask=torch.zeros_like(batch.mask))


def _draws(sequence: TrainSequence) -> Any:
    """Return a number in [0, 1) for each token `[L]` float32: a hash of (ordinal, sample, position) by SplitMix64."""
    state = (np.uint64(sequence.ordinal) << np.uint64(32)) + (np.uint64(sequence.sample_index) << np.uint64(20))
    mixed = state + np.arange(len(sequence.token_ids), dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(40)).astype(np.float32) / np.float32(2**24)
