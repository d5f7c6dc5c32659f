from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hpc_grpo.learner.packing import pack, zero_weight_batch
from hpc_grpo.types import TrainSequence
from tests.support.sequences import ordinary_sequence


def sequence(ordinal: int, sample: int, tokens: list[int], completion: int, advantage: float = 1.0) -> TrainSequence:
    logprobs = -np.arange(1, completion + 1, dtype=np.float32)
    return ordinary_sequence(ordinal, sample, tokens, completion, logprobs, advantage)


def test_a_packed_batch_equals_one_laid_by_hand() -> None:
    batch = pack([sequence(0, 0, [10, 11, 12, 13], 2, 0.5), sequence(0, 1, [20, 21, 22], 1, -1.0)])
    assert batch.input_ids.tolist() == [10, 11, 12, 13, 20, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 7]
    assert batch.target_positions.tolist() == [1, 2, 5]
    assert batch.target_ids.tolist() == [12, 13, 22]
    assert batch.advantages.tolist() == [0.5, 0.5, -1.0]
    assert batch.engine_logprobs.tolist() == [-1.0, -2.0, -1.0]
    assert batch.mask.tolist() == [1.0, 1.0, 1.0]
    assert batch.sequence_ids.tolist() == [0, 0, 1]
    assert batch.document_lengths == (4, 3)


def test_a_token_draws_the_same_number_whatever_it_is_packed_with() -> None:
    sequences = [sequence(ordinal, sample, [1] * 60, 50) for ordinal in range(20) for sample in range(4)]
    together = pack(sequences).draws
    assert together.tolist() == [draw for own in sequences for draw in pack([own]).draws.tolist()]
    assert together.min() >= 0.0
    assert together.max() < 1.0
    assert len(together.unique()) == len(together)
    shares = together.histc(10, 0.0, 1.0) / len(together)
    assert shares.min() > 0.08
    assert shares.max() < 0.12
    by_position = together.reshape(80, 50)
    assert abs(float(np.corrcoef(by_position[:, 0], by_position[:, 1])[0, 1])) < 0.3


def test_what_sequences_of_one_prompt_share_lies_there_once() -> None:
    """A prompt [1, 2, 3] with the completions [4, 5] and [6], and one of another ordinal that begins alike."""
    group = [sequence(0, 0, [1, 2, 3, 4, 5], 2, 0.5), sequence(0, 1, [1, 2, 3, 6], 1, -0.5)]
    batch = pack([*group, sequence(1, 0, [1, 2, 3, 7], 1)], shares_prompts=True)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 3, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2, 3]
    assert batch.target_positions.tolist() == [2, 3, 2, 8]
    assert batch.target_ids.tolist() == [4, 5, 6, 7]
    assert batch.advantages.tolist() == [0.5, 0.5, -0.5, 1.0]
    assert batch.sequence_ids.tolist() == [0, 0, 1, 2]
    assert (batch.document_lengths, batch.prompts) == ((3, 2, 1, 4), (None, 0, 0, None))
    assert pack(group).prompts == (None, None)


def test_experts_lie_beside_their_tokens_and_a_shared_prompt_has_those_of_its_first_sequence() -> None:
    """In the sequence of sample s, token i has the experts [100 s + i, 200 + i] in the only layer."""
    group = [sequence(0, 0, [1, 2, 3, 4, 5], 2), sequence(0, 1, [1, 2, 3, 6], 1)]
    chosen = [
        replace(own, experts=np.array([[[100 * own.sample_index + i, 200 + i]] for i in range(len(own.token_ids))]))
        for own in group
    ]
    shared, apart = (pack(chosen, shares_prompts=shares).experts for shares in (True, False))
    assert shared is not None
    assert apart is not None
    assert shared[:, 0].tolist() == [[0, 200], [1, 201], [2, 202], [3, 203], [4, 204], [103, 203]]
    assert apart[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 100, 101, 102, 103]
    assert pack([chosen[0], group[1]]).experts is None
    with pytest.raises(ValueError, match="has 4 tokens but 3 experts"):
        pack([replace(chosen[1], experts=chosen[1].experts[1:])])


def test_a_shared_prompt_ends_before_the_first_trained_token_and_where_sequences_differ() -> None:
    alike = [sequence(0, 0, [1, 2, 3, 4], 1), sequence(0, 1, [1, 2, 3, 4], 2)]
    assert pack(alike, shares_prompts=True).document_lengths == (2, 2, 2)
    other = [sequence(0, 0, [1, 2, 3, 4], 1), sequence(0, 1, [1, 9, 3, 4], 1)]
    assert pack(other, shares_prompts=True).document_lengths == (1, 3, 3)
    nothing = [sequence(0, 0, [1, 2], 1), sequence(0, 1, [9, 2], 1)]
    assert pack(nothing, shares_prompts=True).prompts == (None, None)


def test_zero_weight_batch_has_no_weight() -> None:
    batch = zero_weight_batch()
    assert batch.mask.tolist() == [0.0]
    assert batch.input_ids.shape == (2,)


def test_a_masked_token_in_mid_episode_is_laid_out_but_not_trained_on() -> None:
    """Two turns with an observation between them: a prompt [1, 2], completions [3, 4] and [6], an observation [5]."""
    loss_mask = np.array([False, False, True, True, False, True])
    episode = TrainSequence(
        ordinal=0,
        sample_index=0,
        token_ids=np.arange(1, 7, dtype=np.int32),
        loss_mask=loss_mask,
        advantages=np.array([0.0, 0.0, 0.5, 0.25, 0.0, -1.0], np.float32),
        engine_logprobs=np.array([0.0, 0.0, -1.0, -2.0, 0.0, -3.0], np.float32),
    )
    batch = pack([sequence(0, 0, [8, 9], 1), episode])
    assert batch.input_ids.tolist() == [8, 9, 1, 2, 3, 4, 5, 6]
    assert batch.target_positions.tolist() == [0, 3, 4, 6]
    assert batch.target_ids.tolist() == [9, 3, 4, 6]
    assert batch.advantages.tolist() == [1.0, 0.5, 0.25, -1.0]
    assert batch.engine_logprobs.tolist() == [-1.0, -1.0, -2.0, -3.0]
    assert batch.sequence_ids.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("loss_mask", [[True, True], [True, False], [False, False]])
def test_a_sequence_needs_a_trained_token_and_one_before_it(loss_mask: list[bool]) -> None:
    wrong = replace(sequence(7, 3, [1, 2], 1), loss_mask=np.array(loss_mask))
    with pytest.raises(ValueError, match="ordinal 7, sample 3"):
        pack([sequence(0, 0, [1, 2], 1), wrong])


@pytest.mark.parametrize("name", ["loss_mask", "advantages", "engine_logprobs"])
def test_an_array_of_another_length_than_the_tokens_is_an_error(name: str) -> None:
    whole = sequence(1, 2, [1, 2, 3], 2)
    with pytest.raises(ValueError, match=f"has 3 tokens but 2 {name}"):
        pack([replace(whole, **{name: getattr(whole, name)[1:]})])
