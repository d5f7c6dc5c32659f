from __future__ import annotations

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards.builtin.keyword_match import keyword_match
from hpc_grpo.rewards.builtin.strict_format import strict_format

GOOD = "<reasoning>\n1 + 1\n</reasoning>\n<answer>\n2\n</answer>\n"


def test_keywords_from_args_count_as_whole_words() -> None:
    scores = keyword_match(["q"] * 3, ["Cat and dog", "concatenate", "c++ CAT"], keyword_list=["cat", "dog", "c++"])
    assert scores == [pytest.approx(2 / 3), 0.0, pytest.approx(2 / 3)]
    assert keyword_match(["q"], ["Cat"], keyword_list=["cat"], case_sensitive=True) == [0.0]


def test_keywords_of_a_column_are_those_of_each_item() -> None:
    assert keyword_match(["q"] * 2, ["a b", "c"], keywords=[["a", "z"], ["c"]]) == [0.5, 1.0]
    assert keyword_match(["q"] * 2, ["a b", "c"], keyword_field="words", words=["a, b", None]) == [1.0, 1.0]
    with pytest.raises(ConfigError, match="columns: answer"):
        keyword_match(["q"], ["a"], answer=["1"])


@pytest.mark.parametrize("completion", [GOOD, GOOD.replace("\n", ""), f"  {GOOD}"])
def test_strict_format_scores_one_for_the_exact_form(completion: str) -> None:
    assert strict_format(["q"], [completion]) == [1.0]


@pytest.mark.parametrize(
    "completion",
    [
        "",
        f"Sure! {GOOD}",
        f"{GOOD} Done.",
        f"{GOOD}{GOOD}",
        GOOD.replace("1 + 1", " "),
        GOOD.replace("</reasoning>", ""),
        GOOD.replace("2", "2</answer><answer>3"),
        GOOD.replace("1 + 1", "<answer>2</answer>"),
        "<answer>2</answer><reasoning>1</reasoning>",
        GOOD.replace("answer", "Answer"),
    ],
)
def test_strict_format_scores_zero_for_any_other_form(completion: str) -> None:
    assert strict_format(["q"], [completion]) == [0.0]


def test_strict_format_takes_other_tags() -> None:
    completion = "<think>hm</think><answer>2</answer>"
    assert strict_format(["q"], [completion], reasoning_tag="think") == [1.0]
    assert strict_format(["q"], [completion]) == [0.0]
