"""Training sequences, samples and grades for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpc_grpo.types import Completion, Episode, GroupGrades, GroupSamples, TrainSequence


def ordinary_sequence(
    ordinal: int, sample_index: int, token_ids: Any, num_trained: int, engine_logprobs: Any = None, advantage: float = 1
) -> TrainSequence:
    """A prompt and one completion, its last `num_trained` tokens; `engine_logprobs` has one for each of those."""
    loss_mask = np.arange(len(token_ids)) >= len(token_ids) - num_trained
    logprobs = np.zeros(len(token_ids), np.float32)
    if engine_logprobs is not None:
        logprobs[loss_mask] = engine_logprobs
    tokens = np.asarray(token_ids, np.int32)
    return TrainSequence(ordinal, sample_index, tokens, loss_mask, loss_mask * np.float32(advantage), logprobs)


def with_experts(sequences: Sequence[TrainSequence], num_layers: int = 2) -> list[TrainSequence]:
    """Give each token two of four experts at random; sequences of one ordinal agree at each position."""
    random = np.random.default_rng(3)
    drawn = random.random((1 + max(own.ordinal for own in sequences), 100, num_layers, 4)).argsort(axis=-1)[..., :2]
    return [replace(own, experts=drawn[own.ordinal, : len(own.token_ids)].astype(np.uint8)) for own in sequences]


def single_answers(ordinal: int, prompt: Sequence[int], completions: Sequence[Completion]) -> GroupSamples:
    """A group whose rollouts are one completion each."""
    context = np.asarray(prompt, np.int32)
    return GroupSamples(
        ordinal, tuple(Episode((replace(own, context_ids=context),), own.finish_reason) for own in completions)
    )


def graded(*rewards: float, **changes: Any) -> GroupGrades:
    """The grades of a group with these rewards: all valid, of 3 tokens each, sampled by version 0."""
    size = len(rewards)
    values: dict[str, Any] = {
        "ordinal": 0,
        "rewards": rewards,
        "reward_parts": {},
        "valid": (True,) * size,
        "num_completion_tokens": (3,) * size,
        "truncated": (False,) * size,
        "min_policy_versions": (0,) * size,
        "mean_policy_versions": (0.0,) * size,
    }
    return GroupGrades(**{**values, **changes})
