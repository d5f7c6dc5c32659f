from __future__ import annotations

import pytest

from hpc_grpo.metrics.reductions import Max, Mean, merge


def test_merge_weighs_means_by_their_counts() -> None:
    ranks = [
        {"loss": Mean(10.0, 4), "worst": Max(-3.0)},
        {"loss": Mean(2.0, 2), "worst": Max(-1.0)},
    ]
    assert merge(ranks) == {"loss": 2.0, "worst": -1.0}


def test_a_rank_may_lack_a_name_and_an_empty_mean_is_zero() -> None:
    assert merge([{"a": Mean(0.0, 0)}, {"b": Max(1.0)}]) == {"a": 0.0, "b": 1.0}
    assert merge([]) == {}


def test_a_name_of_two_kinds_is_an_error() -> None:
    with pytest.raises(TypeError, match="'loss' is a Mean on one rank, a Max on another"):
        merge([{"loss": Mean(1.0)}, {"loss": Max(1.0)}])
