"""Rewards of the text alone: keywords, forms, patterns, schemas, length, repetition."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards.builtin.json_schema import json_schema
from hpc_grpo.rewards.builtin.keyword_match import keyword_match
from hpc_grpo.rewards.builtin.length import length
from hpc_grpo.rewards.builtin.regex import regex
from hpc_grpo.rewards.builtin.repetition import repetition
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


def test_regex_searches_or_matches_the_whole_text() -> None:
    texts = ["say 42\nnow", "42", "forty"]
    assert regex(["q"] * 3, texts, pattern=r"\d+") == [1.0, 1.0, 0.0]
    assert regex(["q"] * 3, texts, pattern=r"\d+", mode="fullmatch") == [0.0, 1.0, 0.0]
    assert regex(["q"] * 3, texts, pattern="say.*NOW", ignore_case=True) == [1.0, 0.0, 0.0]


def test_regex_takes_its_pattern_from_a_column() -> None:
    assert regex(["q"] * 2, ["ab", "ab"], pattern=None, pattern_field="form", form=["^a", "^b"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"pattern": "("}, "is not one of Python's"),
        ({"pattern": "a", "mode": "match"}, "search or fullmatch"),
        ({}, "There is no column 'pattern'; columns: none"),
    ],
)
def test_regex_refuses_what_it_cannot_match(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        regex(["q"], ["a"], **args)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('Here you are:\n```json\n{"name": "Ada", "age": 36}\n```\nDone.', 1.0),
        ('```\n{}\n```\n```json\n{"name": "Ada", "age": 0}\n```', 1.0),
        ('{"name": "Ada", "age": -1}', 0.25),
        ('{"name": "Ada"}', 0.25),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "age": 36} and more', 0.0),
        ("Ada, 36", 0.0),
        ("", 0.0),
        ("[" * 200_000, 0.0),
    ],
)
def test_json_follows_its_schema_or_only_parses_or_neither(completion: str, score: float) -> None:
    assert json_schema(["q"], [completion], schema=PERSON, partial=0.25) == [score]
    assert json_schema(["q"], [completion], schema_field="form", form=[json.dumps(PERSON)], partial=0.25) == [score]


def test_a_fence_that_never_closes_costs_no_time() -> None:
    begun = time.process_time()
    assert json_schema(["q"], ["```" + "\n" * 30_000], schema=PERSON) == [0.0]
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("schema", ["{", '{"type": "texts"}', {"minimum": "1"}])
def test_a_schema_that_is_none_is_an_error(schema: Any) -> None:
    with pytest.raises(ConfigError, match="no JSON schema"):
        json_schema(["q"], ["1"], schema_field="form", form=[schema])


def test_a_reference_in_a_schema_is_not_fetched() -> None:
    with pytest.raises(Exception, match="Unresolvable"):
        json_schema(["q"], ["1"], schema_field="form", form=[{"$ref": "http://127.0.0.1:9/schema.json"}])


def test_length_above_the_most_falls_in_a_straight_line() -> None:
    texts = ["w " * count for count in (0, 10, 15, 20, 100)]
    assert length(["q"] * 5, texts, most=10, over=10) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert length(["q"], ["abcd"], most=2, unit="characters") == [-1.0]


def test_length_near_its_target_is_better() -> None:
    assert length(["q"] * 4, ["w " * count for count in (10, 5, 20, 30)], target=10) == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("args", [{}, {"most": 3, "target": 3}, {"most": 0}, {"target": 3, "unit": "tokens"}])
def test_length_refuses_settings_that_contradict(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"rewards\.N\.args"):
        length(["q"], ["a"], **args)


def test_repetition_is_the_share_of_ngrams_seen_before() -> None:
    texts = ["a b c d", "a b c a b c", "no no no no no", "one two", ""]
    assert repetition(["q"] * 5, texts) == pytest.approx([0.0, -0.25, -2 / 3, 0.0, 0.0])
    assert repetition(["q"], ["a a b"], ngram=1) == pytest.approx([-1 / 3])
