"""What the pool makes of rewards that return, with real worker processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest

from hpc_grpo.config import RewardConfig
from hpc_grpo.errors import HpcGrpoError, RewardError
from hpc_grpo.grading.pool import RewardOutcome, RewardPool


def test_the_reward_is_the_weighted_sum_of_its_parts() -> None:
    rewards = [
        RewardConfig(name="correctness", weight=2.0),
        RewardConfig(name="keyword_match", weight=-0.5, args={"keyword_list": ["so"]}),
        RewardConfig(name="keyword_match", args={"keyword_list": ["no"]}),
    ]
    with closing(RewardPool(rewards, num_workers=2)) as pool:
        pool.check()
        outcome = pool.submit("1+1", ["so 2", "so 3", "2", "no"], {"answer": "#### 2", "level": 1}).result()
    assert outcome.parts == {
        "correctness": (1.0, 0.0, 1.0, 0.0),
        "keyword_match": (1.0, 1.0, 0.0, 0.0),
        "keyword_match#2": (0.0, 0.0, 0.0, 1.0),
    }
    assert outcome.rewards == (1.5, -0.5, 2.0, 1.0)
    assert outcome.valid == (True,) * 4
    assert outcome.errors == ()


def test_fields_are_lists_and_args_are_as_given(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("echo", args={"scale": 10})
    assert pool.submit("p", ["a", "b"], {"level": 3, "answer": "x"}).result().rewards == (30.0, 30.0)


def test_function_without_fields_parameter_gets_what_it_names(open_pool: Callable[..., RewardPool]) -> None:
    assert open_pool("pid").submit("p", ["a", "b"], {"level": 3}).result().valid == (True, True)


def test_a_column_that_the_function_needs_and_the_data_lack_stops_the_run(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("echo", args={"scale": 10})
    with pytest.raises(
        RewardError, match=r"missing a required argument: 'level'.*columns of the data set .*, here: answer"
    ):
        pool.submit("p", ["a"], {"answer": "x"}).result()


def test_workers_import_nothing_heavy(open_pool: Callable[..., RewardPool]) -> None:
    outcome = open_pool("heavy").submit("p", ["a"], {}).result()
    assert outcome.errors == ()


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("nan", "returned nan for completion 0"),
        ("inf", "returned inf for completion 1"),
        ("short", "returned 1 values, [1.0]"),
        ("text", "returned '1' for completion 0"),
        ("none", "returned None for completion 0"),
        ("scalar", "returned 1.0 of type float"),
        ("huge", "for completion 0"),
        ("generator", "of type generator"),
    ],
)
def test_broken_contract_stops_the_run(open_pool: Callable[..., RewardPool], returned: str, words: str) -> None:
    pool = open_pool("returns")
    with pytest.raises(RewardError) as caught:
        pool.submit("p", [returned, "b"], {}).result()
    assert words in str(caught.value)
    assert "pool_rewards.py:returns" in str(caught.value)
    assert "must return one finite number for each of the 2 completions" in str(caught.value)
    assert caught.value.exit_code == 78


def test_array_like_results_and_booleans_are_numbers(open_pool: Callable[..., RewardPool]) -> None:
    assert open_pool("array").submit("p", ["a", "b"], {}).result().rewards == (1.0, 2.0)
    assert open_pool("scalars").submit("p", ["a", "b"], {}).result().rewards == (1.0, 0.5)


def test_reward_that_prints_and_reads_is_scored(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("act")
    assert pool.submit("p", ["print", "b"], {}).result().rewards == (1.0, 1.0)


def test_large_groups_cross_whole(open_pool: Callable[..., RewardPool]) -> None:
    completions = ["x" * size for size in (1, 3_000_000, 7)]
    assert open_pool("length").submit("p", completions, {}).result().rewards == (1.0, 3_000_000.0, 7.0)


def test_by_no_reward_a_group_gets_nothing_and_is_valid() -> None:
    with closing(RewardPool([], num_workers=1)) as pool:
        assert pool.check() == ()
        outcome = pool.submit("p", ["a", "b"], {}).result(timeout=10)
    assert outcome == RewardOutcome((0.0, 0.0), {}, (True, True), (), ("", ""))


def test_a_closed_pool_refuses(open_pool: Callable[..., RewardPool]) -> None:
    pool = open_pool("pid")
    pool.close()
    with pytest.raises(HpcGrpoError, match="is closed"):
        pool.submit("p", ["a"], {})
