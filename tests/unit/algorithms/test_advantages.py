from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest

from hpc_grpo.algorithms.advantages import Advantage, AdvantageSettings, GroupAdvantage
from hpc_grpo.section import OWN, variants
from tests.support.configs import loss_of

BUILT_IN = {name: kind for name, kind in variants(get_args(Advantage)[0]).items() if name != OWN}


def group_advantages(rewards: Sequence[float], valid: Sequence[bool], normalize_std: bool) -> tuple[float, ...]:
    return GroupAdvantage(normalize_std=normalize_std).of_group(rewards, valid)


def named(name: str, **keys: Any) -> AdvantageSettings:
    return loss_of(advantage={"name": name, **keys}).advantage


def test_hand_computed_with_std() -> None:
    # mean 0.5, sample std sqrt(1/3)
    std = math.sqrt(1 / 3) + 1e-4
    expected = (0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std)
    assert group_advantages((1.0, 0.0, 0.0, 1.0), (True,) * 4, True) == pytest.approx(expected, rel=1e-12)


def test_the_deviation_may_be_that_of_the_population_and_its_addend_another() -> None:
    found = named("group", args={"unbiased_std": False, "eps": 1e-8}).of_group((1.0, 0.0, 0.0, 1.0), (True,) * 4)
    assert found == pytest.approx((1.0, -1.0, -1.0, 1.0), rel=1e-6)


def test_a_group_is_centred_and_divided_by_the_deviation_of_all_rewards_of_the_step() -> None:
    rewards = [(1.0, 0.0), (1.0, 1.0), (9.0, 0.0)]
    found = named("group_step_std").of_step(rewards, [(True, True), (True, True), (False, True)])
    scale = float(np.std([1.0, 0.0, 1.0, 1.0, 0.0], ddof=1)) + 1e-4
    assert found == [pytest.approx((0.5 / scale, -0.5 / scale)), (0.0, 0.0), (0.0, 0.0)]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(normalize_std: bool) -> None:
    # The mean of three 0.1 is not 0.1 in floating point.
    assert group_advantages((0.1, 0.1, 0.1), (True,) * 3, normalize_std) == (0.0, 0.0, 0.0)


def test_an_invalid_nan_is_ignored_and_a_valid_one_refused() -> None:
    assert group_advantages((math.nan, 1.0, 0.0), (False, True, True), False) == (0.0, 0.5, -0.5)
    with pytest.raises(ValueError, match="finite"):
        group_advantages((math.nan, 1.0), (True, True), False)
    with pytest.raises(ValueError, match="2 rewards but 1"):
        group_advantages((1.0, 1.0), (True,), False)


def test_shift_and_scale_do_not_change_normalised_advantages() -> None:
    rewards = (0.3, 2.0, -1.0, 0.7)
    plain = group_advantages(rewards, (True,) * 4, True)
    moved = group_advantages(tuple(1000 * r + 7 for r in rewards), (True,) * 4, True)
    assert moved == pytest.approx(plain, rel=1e-3)
    assert sum(plain) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("name", [name for name, kind in BUILT_IN.items() if not kind.compares_groups])
def test_invalid_rollouts_get_nothing_and_change_nothing_for_the_others(name: str) -> None:
    advantage = named(name, **({"args": {"k": 2}} if name == "pass_k" else {})).of_group
    rewards, valid = (1.0, math.nan, 0.0, 0.0, 1.0), (True, False, True, True, True)
    found = advantage(rewards, valid)
    assert found[1] == 0.0
    assert (found[0], *found[2:]) == pytest.approx(advantage((1.0, 0.0, 0.0, 1.0), (True,) * 4))
    assert advantage((0.1,) * 3, (True,) * 3) == (0.0,) * 3
    assert advantage((1.0, 0.0), (True, False)) == (0.0, 0.0)
    with pytest.raises(ValueError, match="finite"):
        advantage((math.nan, 1.0), (True, True))


@pytest.mark.parametrize(("rewards", "k"), [((1, 0, 0, 0, 1, 0), 2), ((1, 0, 0, 0, 0), 3), ((1, 1, 0, 0), 1)])
def test_pass_k_is_the_mean_advantage_over_the_subsets_that_a_rollout_is_in(rewards: tuple[int, ...], k: int) -> None:
    # Section 2.2 of arXiv:2508.10751: a subset's reward is its best, its advantage that of GRPO over all subsets.
    subsets = list(itertools.combinations(range(len(rewards)), k))
    worth = np.array([max(rewards[i] for i in subset) for subset in subsets], dtype=float)
    normalised = (worth - worth.mean()) / worth.std()
    own = [np.mean([a for a, s in zip(normalised, subsets, strict=True) if i in s]) for i in range(len(rewards))]
    found = named("pass_k", args={"k": k}).of_group(rewards, (True,) * len(rewards))
    assert found == pytest.approx(own, abs=1e-12)


def test_a_group_in_which_every_subset_passes_teaches_pass_k_nothing() -> None:
    assert named("pass_k", args={"k": 2}).of_group((1.0, 1.0, 0.0), (True,) * 3) == (0.0,) * 3
    assert named("pass_k", args={"k": 2}).of_group((0.0,) * 3, (True,) * 3) == (0.0,) * 3


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_step_is_normalised_as_a_whole(name: str) -> None:
    random = np.random.default_rng(0)
    rewards = [tuple(random.normal(size=4) + offset) for offset in (0.0, 5.0, -1.0)]
    valid = [(True, True, False, True), (True,) * 4, (True,) * 4]
    found = named(name).of_step(rewards, valid)
    flat = np.array(
        [a for row, flags in zip(found, valid, strict=True) for a, ok in zip(row, flags, strict=True) if ok]
    )
    assert found[0][2] == 0.0
    assert (flat.mean(), flat.std()) == pytest.approx((0.0, 1.0), abs=1e-6)
    baselines = [np.mean(np.array(row)[np.array(flags)]) for row, flags in zip(rewards, valid, strict=True)]
    means = baselines if name.endswith("baseline") else [0.0] * 3
    raw = [r - m for row, flags, m in zip(rewards, valid, means, strict=True)
           for r, ok in zip(row, flags, strict=True) if ok]  # fmt: skip
    np.testing.assert_allclose(flat, (np.array(raw) - np.mean(raw)) / (np.std(raw) + 1e-8), rtol=1e-9)


def test_equal_rewards_of_a_step_teach_nothing() -> None:
    assert named("reinforce_pp").of_step([(0.1, 0.1), (0.1,)], [(True, True), (True,)]) == [(0.0, 0.0), (0.0,)]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_group_of_equal_rewards_gets_exactly_zero_beside_others(normalize_std: bool) -> None:
    # The centred rewards of the first group do not quite add up to 0 in floating point.
    rewards = [(1.0, 0.0, 0.0), (1.0, 1.0, 1.0)]
    found = named("reinforce_pp_baseline", normalize_std=normalize_std).of_step(rewards, [(True,) * 3] * 2)
    assert any(found[0])
    assert found[1] == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_turns_are_compared_with_those_of_the_same_number_by_their_discounted_returns(normalize_std: bool) -> None:
    """Against loops in float64: episodes of unequal length, some invalid, with rewards beside the environment's."""
    random, largest = np.random.default_rng(5), 0.0
    for _ in range(200):
        size, discount = int(random.integers(1, 7)), float(random.choice([0.0, 0.6, 1.0]))
        of_turns = [tuple(map(float, random.normal(size=random.integers(1, 5)))) for _ in range(size)]
        others, valid = random.normal(size=size), [bool(own) for own in random.random(size) < 0.8]
        rewards = [sum(own) + float(other) for own, other in zip(of_turns, others, strict=True)]
        found = named("turns", args={"discount": discount}, normalize_std=normalize_std).of_group(
            rewards, valid, of_turns
        )
        for i, own in enumerate(of_turns):
            assert isinstance(found[i], tuple)
            for k in range(len(own)):
                returns = [
                    sum(discount ** (j - k) * r for j, r in enumerate((*each[:-1], each[-1] + other)) if j >= k)
                    for each, other, ok in zip(of_turns, others, valid, strict=True)
                    if ok and len(each) > k
                ]
                expected = 0.0
                if valid[i] and len(returns) > 1:
                    at = sum(ok and len(each) > k for each, ok in zip(of_turns[:i], valid[:i], strict=True))
                    mean = math.fsum(returns) / len(returns)
                    variance = math.fsum((r - mean) ** 2 for r in returns) / (len(returns) - 1)
                    expected = (returns[at] - mean) / (math.sqrt(variance) + 1e-4 if normalize_std else 1.0)
                largest = max(largest, abs(found[i][k] - expected))
    print(f"| advantages by turn, normalize_std={normalize_std} | largest difference {largest:.1e} |")
    assert largest < 1e-9


def test_of_one_turn_each_they_are_the_advantages_of_the_group() -> None:
    rewards, valid = (0.3, 2.0, -1.0, 0.7), (True, True, False, True)
    expected = group_advantages(rewards, valid, True)
    assert named("turns").of_group(rewards, valid) == expected
    assert named("turns").of_group(rewards, valid, [(0.5,)] * 4) == [(own,) for own in expected]
