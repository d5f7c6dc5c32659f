"""Rewards that compare with a reference: gsm8k, multiple_choice, string_f1."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards.builtin.gsm8k import gsm8k
from hpc_grpo.rewards.builtin.multiple_choice import multiple_choice
from hpc_grpo.rewards.builtin.string_f1 import string_f1

GSM8K = "She sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        ("48 + 24\n#### 72", 1.0, 1.0),
        ("#### $72.00", 1.0, 1.0),
        ("The answer is 72.", 0.0, 1.0),
        ("#### 71", 0.0, 0.0),
        ("#### seventy-two", 0.0, 0.0),
        ("#### 72 clips", 0.0, 1.0),
        ("", 0.0, 0.0),
    ],
)
def test_gsm8k_strict_wants_the_mark_and_flexible_the_last_number(
    completion: str, strict: float, flexible: float
) -> None:
    assert gsm8k(["q"], [completion], answer=[GSM8K]) == [strict]
    assert gsm8k(["q"], [completion], answer=[GSM8K], method="flexible") == [flexible]


def test_gsm8k_refuses_a_reference_without_number_and_an_unknown_method() -> None:
    with pytest.raises(ConfigError, match="use math"):
        gsm8k(["q"], ["1"], answer=["Paris"])
    with pytest.raises(ConfigError, match="strict or flexible"):
        gsm8k(["q"], ["1"], answer=["1"], method="loose")


@pytest.mark.parametrize(
    ("completion", "choice"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B. Paris", "B"),
        ("B) A large city", "B"),
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(B)}}", "B"),
        (r"A is wrong. \boxed{B. A large city}", "B"),
        ("<answer> (B) </answer>", "B"),
        ("Option A looks right, but the answer is B.", "B"),
        ("The correct answer: **B**", "B"),
        ("answer is (B) since the answer is not A", "B"),
        ("So I choose B, thus final choice: B", "B"),
        ("A large city lies there.", None),
        ("I think it may be B or C", None),
        (r"\boxed{A or B}", None),
        (r"\boxed{Paris}", None),
        ("", None),
        ("The answer is Berlin.", None),
        ("The answer is F.", None),
    ],
)
def test_the_chosen_letter_is_the_marked_or_announced_one(completion: str, choice: str | None) -> None:
    scores = {letter: multiple_choice(["q"], [completion], answer=[letter])[0] for letter in "ABCDE"}
    assert [letter for letter, score in scores.items() if score] == ([choice] if choice else [])


@pytest.mark.parametrize("reference", ["B", "b", "(B)", "B.", 1, "1"])
def test_the_reference_is_a_letter_or_its_number(reference: Any) -> None:
    assert multiple_choice(["q"] * 2, ["B", "A"], answer=[reference] * 2) == [1.0, 0.0]


@pytest.mark.parametrize("reference", ["G", 7, "Paris", None])
def test_a_reference_that_is_no_choice_is_an_error(reference: Any) -> None:
    with pytest.raises(ConfigError, match="none of the letters ABCDE"):
        multiple_choice(["q"], ["B"], answer=[reference])


@pytest.mark.parametrize(
    ("completion", "reference", "score"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("Eiffel", "Eiffel Tower", 2 / 3),
        ("the big big dog", "big dog", 4 / 5),
        ("I guess: <answer>Paris</answer>", "paris", 1.0),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
        ("New York City", ["NYC", "New York"], 4 / 5),
    ],
)
def test_string_f1_is_that_of_squad(completion: str, reference: Any, score: float) -> None:
    assert string_f1(["q"], [completion], answer=[reference]) == [pytest.approx(score)]


@pytest.mark.parametrize("name", ["math", "gsm8k", "multiple_choice", "string_f1"])
def test_a_missing_reference_names_the_fix(name: str) -> None:
    with pytest.raises(ConfigError, match="answer_field"):
        REWARDS.find(name)(["q"], ["1"], level=[3])
