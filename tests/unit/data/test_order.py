"""Properties of the order of a mix, over whatever sources, counts, seeds and steps hypothesis thinks of."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_grpo.config import SourceConfig
from hpc_grpo.data.stream import MixOrder, Place, epoch_permutation, places_per_epoch, sampling_seed

SOURCES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 20)), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**40)


def order_of(sources: list[tuple[int, int]], seed: int, shuffle: bool = True) -> MixOrder:
    """Make the order of sources given as (items, places of an epoch)."""
    sizes, places = zip(*sources, strict=True)
    return MixOrder(sizes, places, seed, shuffle)


@settings(max_examples=60, deadline=None)
@given(SOURCES, SEEDS, st.booleans())
def test_an_epoch_has_the_places_of_each_source_and_a_source_repeats_no_item_before_all_were_asked(
    sources: list[tuple[int, int]], seed: int, shuffle: bool
) -> None:
    order = order_of(sources, seed, shuffle)
    asked: list[list[int]] = [[] for _ in sources]
    for epoch in range(3):
        found = [order.find(epoch * len(order) + place) for place in range(len(order))]
        assert {each.epoch for each in found} == {epoch}
        assert Counter(each.source for each in found) == {at: places for at, (_, places) in enumerate(sources)}
        for each in found:
            assert each.turn == len(asked[each.source]) // sources[each.source][0]
            asked[each.source].append(each.item)
    for (size, _), items in zip(sources, asked, strict=True):
        walks = [items[start : start + size] for start in range(0, len(items), size)]
        assert all(len(set(walk)) == len(walk) for walk in walks)
        assert all(set(walk) == set(range(size)) for walk in walks if len(walk) == size)


@settings(max_examples=60, deadline=None)
@given(SOURCES, SEEDS, st.integers(1, 9), st.integers(0, 12))
def test_a_resume_at_any_step_gives_the_same_batches(
    sources: list[tuple[int, int]], seed: int, prompts_per_step: int, step: int
) -> None:
    def batches(order: MixOrder, first: int) -> list[list[Place]]:
        ordinals = [range(at * prompts_per_step, (at + 1) * prompts_per_step) for at in range(first, 16)]
        return [[order.find(ordinal) for ordinal in own] for own in ordinals]

    straight = batches(order_of(sources, seed), 0)
    assert batches(order_of(sources, seed), step) == straight[step:]
    backwards = order_of(sources, seed)
    last_first = [backwards.find(ordinal) for ordinal in reversed(range(16 * prompts_per_step))]
    assert last_first[::-1] == [each for batch in straight for each in batch]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**31), st.integers(0, 5))
def test_one_source_has_the_order_that_runs_had_before_there_were_mixes(size: int, seed: int, epoch: int) -> None:
    order = MixOrder([size], [size], seed, shuffle=True)
    found = [order.find(epoch * size + place) for place in range(size)]
    assert found == [(epoch, 0, item, epoch) for item in epoch_permutation(size, seed, epoch).tolist()]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0.01, 100.0)), min_size=1, max_size=5))
def test_weights_share_an_epoch_to_within_one_place(sources: list[tuple[int, float]]) -> None:
    sizes = [size for size, _ in sources]
    weights = [weight for _, weight in sources]
    places = places_per_epoch([SourceConfig(path="x", weight=weight) for weight in weights], sizes)
    for count, weight in zip(places, weights, strict=True):
        share = weight / sum(weights) * sum(sizes)
        assert count >= 1
        assert abs(count - share) <= 1.0 + 1e-6


def test_without_shuffle_sources_come_one_after_the_other() -> None:
    order = order_of([(2, 3), (5, 2)], seed=7, shuffle=False)
    assert [order.find(ordinal)[1:3] for ordinal in range(10)] == [
        *[(0, 0), (0, 1), (0, 0), (1, 0), (1, 1)],
        *[(0, 1), (0, 0), (0, 1), (1, 2), (1, 3)],
    ]


def test_the_order_of_a_mix_golden() -> None:
    """A change of these values would make every mixed run in flight resume on the wrong prompts."""
    order = order_of([(5, 3), (4, 4)], seed=3)
    assert [order.find(ordinal)[:3] for ordinal in range(7)] == GOLDEN


GOLDEN = [(0, 0, 4), (0, 1, 2), (0, 1, 0), (0, 0, 2), (0, 1, 1), (0, 1, 3), (0, 0, 1)]


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_permutation(100, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_permutation_golden() -> None:
    """A change of these values would make every run in flight resume on the wrong prompts."""
    assert epoch_permutation(10, seed=0, epoch=0).tolist() == [4, 6, 2, 7, 3, 5, 9, 0, 8, 1]
    assert epoch_permutation(10, seed=42, epoch=3).tolist() == [4, 3, 7, 2, 5, 1, 9, 8, 0, 6]
    large = epoch_permutation(100_000, seed=1, epoch=2)
    assert large[:5].tolist() == [48329, 66367, 61851, 26040, 15071]


def test_sampling_seed_golden() -> None:
    assert sampling_seed(0, 0, 0, 0) == 156270622
    assert sampling_seed(1, 23, 4, 567) == 905154140


def test_sampling_seeds_depend_on_every_argument_and_fit_31_bits() -> None:
    arguments = [(a, b, c, d) for a in range(6) for b in range(6) for c in range(6) for d in range(6)]
    seeds = np.array([sampling_seed(*each) for each in arguments])
    assert len(np.unique(seeds)) == len(arguments)
    assert seeds.min() >= 0
    assert seeds.max() < 2**31
    assert seeds.max() > 2**30
