from __future__ import annotations

import math

import pytest

from hpc_grpo.algorithms.advantages.group import group_advantages


def test_hand_computed_with_std() -> None:
    # mean 0.5, sample std sqrt(1/3)
    std = math.sqrt(1 / 3) + 1e-4
    expected = (0.5 / std, -0.5 / std, -0.5 / std, 0.5 / std)
    assert group_advantages((1.0, 0.0, 0.0, 1.0), (True,) * 4, True) == pytest.approx(expected, rel=1e-12)


def test_invalid_rollouts_do_not_shift_the_others() -> None:
    with_invalid = group_advantages((3.0, 0.0, 1.0, 0.0), (True, False, True, False), True)
    alone = group_advantages((3.0, 1.0), (True, True), True)
    assert (with_invalid[0], with_invalid[2]) == alone
    assert (with_invalid[1], with_invalid[3]) == (0.0, 0.0)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(normalize_std: bool) -> None:
    # The mean of three 0.1 is not 0.1 in floating point.
    assert group_advantages((0.1, 0.1, 0.1), (True,) * 3, normalize_std) == (0.0, 0.0, 0.0)


def test_one_valid_or_none() -> None:
    assert group_advantages((5.0, 1.0), (True, False), True) == (0.0, 0.0)
    assert group_advantages((5.0, 1.0), (False, False), True) == (0.0, 0.0)


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
