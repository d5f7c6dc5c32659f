from __future__ import annotations

import random

import numpy as np
import pytest

from hpc_grpo.learner.packing import pack, split_microbatches, zero_weight_batch
from hpc_grpo.types import TrainSequence


def sequence(ordinal: int, sample: int, tokens: list[int], completion: int, advantage: float = 1.0) -> TrainSequence:
    logprobs = -np.arange(1, completion + 1, dtype=np.float32)
    return TrainSequence(ordinal, sample, np.array(tokens, dtype=np.int32), completion, logprobs, advantage)


def test_hand_laid_batch() -> None:
    batch = pack([sequence(0, 0, [10, 11, 12, 13], 2, 0.5), sequence(0, 1, [20, 21, 22], 1, -1.0)])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.target_positions.tolist() == [1, 2, 5]
    assert batch.target_ids.tolist() == [12, 13, 22]
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0]
    assert batch.engine_logprobs.tolist() == [-1.0, -2.0, -1.0]
    assert batch.mask.tolist() == [1.0, 1.0, 1.0]
    assert batch.document_lengths == (4, 3)


def test_split_keeps_order_and_budget_whatever_order_came_in() -> None:
    rng = random.Random(0)
    sequences = [sequence(i // 3, i % 3, [1] * rng.randint(2, 30), 1) for i in range(40)]
    groups = split_microbatches(sequences, 64)
    shuffled = sequences[:]
    rng.shuffle(shuffled)
    assert split_microbatches(shuffled, 64) == groups
    assert [s for group in groups for s in group] == sequences
    totals = [sum(len(s.token_ids) for s in group) for group in groups]
    assert max(totals) <= 64
    assert all(a + len(group[0].token_ids) > 64 for a, group in zip(totals[:-1], groups[1:], strict=True))


def test_a_sequence_beyond_the_budget_is_alone() -> None:
    long, short = sequence(0, 0, [1] * 50, 1), sequence(0, 1, [1] * 5, 1)
    assert split_microbatches([short, long], 20) == [[long], [short]]
    assert split_microbatches([], 20) == []


def test_zero_weight_batch_has_no_weight() -> None:
    batch = zero_weight_batch()
    assert batch.mask.tolist() == [0.0]
    assert batch.input_ids.shape == (2,)


@pytest.mark.parametrize(("tokens", "completion"), [([1, 2], 2), ([1, 2], 0)])
def test_a_sequence_needs_prompt_and_completion(tokens: list[int], completion: int) -> None:
    with pytest.raises(ValueError, match="ordinal 7, sample 3"):
        pack([sequence(0, 0, [1, 2], 1), sequence(7, 3, tokens, completion)])


def test_engine_logprobs_must_fit() -> None:
    wrong = TrainSequence(1, 2, np.array([1, 2, 3], dtype=np.int32), 2, np.zeros(1, np.float32), 1.0)
    with pytest.raises(ValueError, match="2 completion tokens but 1 engine_logprobs"):
        pack([wrong])
    none = TrainSequence(1, 2, np.array([1, 2, 3], dtype=np.int32), 2, np.zeros(0, np.float32), 1.0)
    assert pack([none]).engine_logprobs.tolist() == [0.0, 0.0]
