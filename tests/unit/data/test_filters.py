from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_grpo.data.filters import LengthRule, fitting, held_out, lowest, without_duplicates
from hpc_grpo.errors import ConfigError

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=40)
REPEATED = st.lists(st.integers(0, 6), max_size=40)


@settings(max_examples=60, deadline=None)
@given(HASHES, HASHES, st.floats(0.01, 0.99))
def test_a_row_stays_on_its_side_of_the_split_whatever_other_rows_there_are(
    hashes: list[int], others: list[int], fraction: float
) -> None:
    alone = held_out(np.array(hashes, dtype=np.uint64), fraction)
    beside = held_out(np.array([*others, *hashes], dtype=np.uint64), fraction)
    assert alone.tolist() == beside[len(others) :].tolist()


def test_the_split_takes_its_fraction() -> None:
    hashes = np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, 100_000, dtype=np.uint64)
    assert held_out(hashes, 0.05).mean() == pytest.approx(0.05, abs=0.003)


@settings(max_examples=100, deadline=None)
@given(REPEATED, REPEATED)
def test_of_equal_prompts_the_first_stays_and_none_that_was_seen(hashes: list[int], seen: list[int]) -> None:
    candidates = np.arange(len(hashes), dtype=np.int64)
    kept, now_seen = without_duplicates(
        candidates, np.array(hashes, dtype=np.uint64), np.unique(np.array(seen, dtype=np.uint64))
    )
    expected, known = [], set(seen)
    for number, value in enumerate(hashes):
        if value not in known:
            expected.append(number)
            known.add(value)
    assert kept.tolist() == expected
    assert set(now_seen.tolist()) == known


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 20))
def test_what_fits_is_kept_in_order_or_the_first_long_one_is_named(lengths: list[int], most: int) -> None:
    tokens, rule = np.array(lengths, dtype=np.int32), LengthRule("data.max_prompt_tokens", most, "d.jsonl", "Raise it")
    candidates = np.arange(len(lengths), dtype=np.int64)
    fits = [number for number, length in enumerate(lengths) if length <= most]
    if fits:
        assert fitting(candidates, tokens, rule, drop=True).tolist() == fits
    else:
        with pytest.raises(ConfigError, match="leaves nothing"):
            fitting(candidates, tokens, rule, drop=True)
    if len(fits) < len(lengths):
        first = next(number for number, length in enumerate(lengths) if length > most)
        with pytest.raises(ConfigError, match=f"Item {first} of d.jsonl"):
            fitting(candidates, tokens, rule, drop=False)


def test_a_sample_of_the_held_out_rows_is_that_of_the_lowest_hashes() -> None:
    hashes = np.array([50, 10, 40, 20, 30], dtype=np.uint64)
    assert lowest(np.array([0, 2, 3, 4]), hashes, 2).tolist() == [3, 4]
