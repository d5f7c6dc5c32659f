from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from hpc_grpo.config.resources import Budget, budget_of
from hpc_grpo.learner.packing import pack
from hpc_grpo.learner.split import cost, shared_length, split_microbatches
from hpc_grpo.types import TrainSequence
from tests.support.configs import minimal_config
from tests.support.sequences import ordinary_sequence


def ragged(seed: int) -> list[TrainSequence]:
    """Ten groups of up to six sequences, of a prompt of 1 to 30 tokens and completions of 1 to 30."""
    numbers, made = random.Random(seed), []
    for ordinal in range(10):
        prompt = [numbers.randint(2, 9) for _ in range(numbers.randint(1, 30))]
        for sample in range(numbers.randint(1, 6)):
            own = [numbers.randint(2, 9) for _ in range(numbers.randint(1, 30))]
            made.append(ordinary_sequence(ordinal, sample, [*prompt, *own], len(own)))
    return made


def test_sequences_of_an_ordinal_share_what_they_have_alike_and_no_more() -> None:
    """Those of an episode whose history was rewritten have another prompt than the others of their group."""
    group = [ordinary_sequence(0, sample, [7, 7, 7, sample], 1) for sample in range(2)]
    rewritten = ordinary_sequence(0, 2, [7, 7, 9, 9, 9, 3], 1)
    assert [shared_length(own) for own in (group, [*group, rewritten], [rewritten])] == [3, 2, 0]
    batch = pack([*group, rewritten], shares_prompts=True)
    assert batch.input_ids.tolist() == [7, 7, 7, 0, 7, 1, 9, 9, 9, 3]
    assert batch.target_positions.tolist() == [2, 4, 8]


def places(part: list[TrainSequence]) -> list[tuple[int, int]]:
    return [(sequence.ordinal, sequence.sample_index) for sequence in part]


@pytest.mark.parametrize("shares_prompts", [False, True])
@pytest.mark.parametrize("at_least", [0, 12])
def test_every_sequence_is_in_one_microbatch_within_the_budget_whatever_order_it_came_in(
    shares_prompts: bool, at_least: int
) -> None:
    for seed in range(5):
        sequences, budget = ragged(seed), Budget(90, shares_prompts)
        parts = split_microbatches(sequences, budget, at_least)
        shuffled = random.Random(seed).sample(sequences, len(sequences))
        assert list(map(places, split_microbatches(shuffled, budget, at_least))) == list(map(places, parts))
        assert sorted(place for part in parts for place in places(part)) == places(sequences)
        assert all(places(part) == sorted(places(part)) for part in parts)
        assert all(len(pack(part, shares_prompts=shares_prompts).input_ids) <= 90 for part in parts)
        assert len(parts) >= min(at_least, 10)


def test_microbatches_of_a_rank_cost_about_the_same_and_the_costliest_comes_first() -> None:
    sequences = [ordinary_sequence(i, 0, np.full(200 if i % 7 else 900, 3), 5) for i in range(70)]
    parts = split_microbatches(sequences, Budget(4096))
    costs = [sum(cost(0, [len(own.token_ids)], is_shared=False) for own in part) for part in parts]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] / costs[-1] < 1.15
    total = sum(len(own.token_ids) for own in sequences)
    assert len(parts) <= -(-total // 4096) + 1


def test_the_cost_of_a_group_counts_a_shared_prompt_once_and_grows_faster_than_its_length() -> None:
    assert cost(100, [10, 30], is_shared=False) == pytest.approx(240, rel=0.01)
    assert cost(100, [10, 30], is_shared=True) == pytest.approx(140, rel=0.02)
    assert cost(100, [], is_shared=True) == cost(100, [], is_shared=False) == 0.0
    assert cost(0, [8000], is_shared=False) > 1.2 * cost(0, [4000] * 2, is_shared=False)


def test_a_sequence_beyond_the_budget_is_alone() -> None:
    long, short = ordinary_sequence(0, 0, [1] * 50, 1), ordinary_sequence(0, 1, [1] * 5, 1)
    assert split_microbatches([short, long], Budget(20)) == [[long], [short]]
    assert split_microbatches([], Budget(20), at_least=2) == []


def test_a_group_that_shares_its_prompt_stays_together_as_far_as_it_fits() -> None:
    group = [ordinary_sequence(0, sample, [7] * 40 + [sample] * 5, 5) for sample in range(16)]
    together = split_microbatches(group, Budget(640 // 4 + 40, shares_prompts=True))
    assert list(map(len, together)) == [16]
    cut = split_microbatches(group, Budget(100, shares_prompts=True))
    assert list(map(len, cut)) == [8, 8]
    assert len(split_microbatches(group, Budget(100))) == 8


def test_keys_that_many_completions_read_again_count_in_the_budget() -> None:
    group = [ordinary_sequence(0, sample, [7] * 90 + [sample], 1) for sample in range(16)]
    parts = split_microbatches(group, Budget(110, shares_prompts=True))
    assert all(sum(len(own.token_ids) for own in part) <= 4 * 110 for part in parts)
    assert len(parts) == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"device": "cpu"}}, True),
        ({"model": {"device": "auto"}}, False),
        ({"model": {"device": "auto"}, "train": {"share_prompts": True}}, True),
        ({"model": {"device": "cpu"}, "train": {"share_prompts": False}}, False),
    ],
)
def test_prompts_are_shared_on_cpu_unless_the_config_says_otherwise(changes: Any, expected: bool) -> None:
    assert budget_of(minimal_config(**changes)) == Budget(8192, expected)
