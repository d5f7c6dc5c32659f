from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest

from hpc_grpo.config import EvalConfig
from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.evals import (
    EvalGroup,
    difference_interval,
    eval_metrics,
    mean_interval,
    paired_differences,
    pass_at_k,
    share_interval,
)

SETTINGS = EvalConfig(num_samples=3)


def group(solved: Sequence[int], source: str = "gcd", **changes: Any) -> EvalGroup:
    flags = tuple(map(bool, solved))
    values: dict[str, Any] = {
        "prompt": "What is 1+1?",
        "source": source,
        "fields": {"answer": "2"},
        "completions": tuple("2" if flag else "3" for flag in flags),
        "rewards": tuple(map(float, solved)),
        "solved": flags,
        "num_tokens": (2, 4, 6),
    }
    return EvalGroup(**{**values, **changes})


def test_pass_at_k_equals_enumeration() -> None:
    for n in range(1, 7):
        for c in range(n + 1):
            for k in range(1, n + 1):
                subsets = list(combinations([True] * c + [False] * (n - c), k))
                expected = sum(any(subset) for subset in subsets) / len(subsets)
                assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_many_samples_is_exact() -> None:
    assert pass_at_k(2000, 1, 1000) == pytest.approx(0.5)


def test_of_several_sources_each_has_metrics_of_its_own_and_of_one_none() -> None:
    groups = [group((1, 0, 0)), group((1, 1, 1)), group((0, 0, 0), "sums", num_tokens=(9, 9, 9))]
    metrics = eval_metrics(groups, SETTINGS)
    assert metrics["pass@1"] == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert metrics["pass@2/gcd"] == pytest.approx((2 / 3 + 1) / 2)
    assert (metrics["pass@1/sums"], metrics["reward_mean/sums"], metrics["tokens_mean/sums"]) == (0.0, 0.0, 9.0)
    assert metrics["pass@1_low/sums"] == 0.0 < metrics["pass@1_high/sums"] < 1.0
    alone = eval_metrics(groups[:2], SETTINGS)
    assert alone == {name.removesuffix("/gcd"): value for name, value in metrics.items() if name.endswith("/gcd")}


@pytest.mark.parametrize(
    ("count", "num_prompts", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_one_sample_a_prompt_is_wilsons(count: int, num_prompts: int, low: float, high: float) -> None:
    """The numbers are those of Newcombe 1998, Statistics in Medicine 17, table I, method 3."""
    shares = [1.0] * count + [0.0] * (num_prompts - count)
    assert share_interval(shares) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("num_prompts", range(1, 40))
def test_the_interval_of_none_or_all_ends_at_exactly_0_or_1(num_prompts: int) -> None:
    assert (share_interval([0.0] * num_prompts)[0], share_interval([1.0] * num_prompts)[1]) == (0.0, 1.0)


def test_further_completions_of_a_prompt_count_as_far_as_they_tell_more() -> None:
    one_each = share_interval([0.0, 1.0] * 20)
    assert share_interval([0.0, 1.0] * 20, max_draws=4) == one_each  # all four of a prompt alike
    assert share_interval([0.5] * 40, max_draws=4) == share_interval([0.0, 1.0] * 80)  # as if of 160 prompts, no more


@pytest.mark.parametrize(("num_samples", "hardness"), [(1, 0.5), (4, 0.5), (4, 3.0)])
def test_95_of_100_intervals_hold_the_truth(num_samples: int, hardness: float) -> None:
    """Prompts are drawn from a population of solve rates, and completions of each by its rate."""
    rng = random.Random(0)
    truth, held, num_evals = 1.0 / (1.0 + hardness / 0.5), 0, 1000
    for _ in range(num_evals):
        rates = [rng.betavariate(0.5, hardness) for _ in range(50)]
        shares = [fmean(rng.random() < rate for _ in range(num_samples)) for rate in rates]
        low, high = share_interval(shares, num_samples)
        held += low <= truth <= high
    assert 0.92 <= held / num_evals <= 0.98


def test_the_interval_of_a_mean_is_that_of_the_central_limit_theorem() -> None:
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0])
    half = 1.959964 * math.sqrt(5 / 3) / 2
    assert (low, high) == pytest.approx((2.5 - half, 2.5 + half), abs=1e-5)


def majority(groups: Sequence[EvalGroup]) -> dict[str, float]:
    return {"prompts": len(groups), "majority": fmean(sum(each.solved) > 1 for each in groups)}


def test_a_metric_of_ones_own_sees_what_was_graded_of_the_set_and_of_each_source() -> None:
    groups = [group((1, 0, 0)), group((1, 1, 1), "sums"), group((0, 0, 0), "sums", is_graded=False)]
    metrics = eval_metrics(groups, SETTINGS, {"mine:majority": majority})
    assert (metrics["prompts"], metrics["majority"]) == (2.0, 0.5)
    assert (metrics["majority/gcd"], metrics["majority/sums"], metrics["prompts/sums"]) == (0.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (0.5, "not 0.5"),
        ({"pass@1": 1.0}, "'pass@1' is taken"),
        ({"m": math.nan}, "'m' is nan"),
        ({"m": "1"}, "is '1'"),
        ({"m": 10**400}, "'m' is 1"),
    ],
)
def test_a_metric_of_ones_own_that_breaks_its_contract_is_refused(returned: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=r"eval.metrics: mine:wrong must return") as error:
        eval_metrics([group((1, 0, 0))], SETTINGS, {"mine:wrong": lambda groups: returned})
    assert named in str(error.value)


def test_a_metric_of_ones_own_that_raises_is_named_with_the_line_that_did() -> None:
    def broken(groups: Sequence[EvalGroup]) -> dict[str, float]:
        return {"share": 1 / 0}

    with pytest.raises(
        ConfigError, match=r"eval\.metrics: mine:broken failed: ZeroDivisionError: .*test_evals\.py:\d+"
    ):
        eval_metrics([group((1, 0, 0))], SETTINGS, {"mine:broken": broken})


def test_a_difference_is_that_of_the_same_prompts_with_its_interval() -> None:
    before = [group([0, 0, 0]), group([1, 0, 0]), group([1, 1, 1], is_graded=False), group([1, 1, 1], "sums")]
    after = [group([1, 0, 0], num_tokens=(1, 2, 3)), group([1, 1, 1]), group([0, 0, 0]), group([1, 1, 0], "sums")]
    found = paired_differences(before, after, SETTINGS)
    assert found["pass@1"] == pytest.approx((1 / 3 + 2 / 3 - 1 / 3) / 3)
    assert found["pass@2/gcd"] == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert found["reward_mean/sums"] == pytest.approx(-1 / 3)
    assert found["tokens_mean"] == pytest.approx(-0.5)
    assert found["pass@1_low"] < found["pass@1"] < found["pass@1_high"]
    assert paired_differences(before, [*after[:3], group([1], fields={"answer": "3"})], SETTINGS) == {}
    gaps = [[group([1, 0], fields={"answer": "3", "level": float("nan")})] for _ in range(2)]
    assert paired_differences(*gaps, SETTINGS)["pass@1"] == 0.0


def test_the_interval_of_matched_proportions_is_agrestis_and_mins() -> None:
    """With b prompts lost and c won of n: their R code, http://users.stat.ufl.edu/~aa/cda/R/matched/R2_matched."""
    b, c, n, z = 3, 9, 40, 1.959963984540054
    middle = (c - b) / (n + 2)
    half = z * math.sqrt((b + c + 1) - (c - b) ** 2 / (n + 2)) / (n + 2)
    found = difference_interval([-1.0] * b + [1.0] * c + [0.0] * (n - b - c))
    assert found == pytest.approx((middle - half, middle + half), abs=1e-12)


@pytest.mark.parametrize(("lost", "won"), [(0.05, 0.05), (0.02, 0.4), (0.25, 0.35), (0.0, 0.05)])
@pytest.mark.parametrize("num_prompts", [20, 200])
def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_says(
    lost: float, won: float, num_prompts: int
) -> None:
    chance, trials = random.Random(7), 2000
    held = 0
    for _ in range(trials):
        drawn = chance.choices([-1.0, 1.0, 0.0], [lost, won, 1 - lost - won], k=num_prompts)
        low, high = difference_interval(drawn)
        held += low <= won - lost <= high
    assert held / trials > 0.93
