"""Rewards of the text alone: keywords, forms, patterns, schemas, length, repetition."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import score

GOOD = "<reasoning>\n1 + 1\n</reasoning>\n<answer>\n2\n</answer>\n"


def test_keywords_from_args_count_as_whole_words() -> None:
    args: dict[str, Any] = {"keyword_list": ["cat", "dog", "c++"]}
    scores = score("keyword_match", ["Cat and dog", "concatenate", "c++ CAT"], {}, args=args)
    assert scores == [pytest.approx(2 / 3), 0.0, pytest.approx(2 / 3)]
    args = {"keyword_list": ["cat"], "case_sensitive": True}
    assert score("keyword_match", ["Cat"], {}, args=args) == [0.0]


def test_a_keyword_counts_in_italics_and_across_lines_and_not_in_a_longer_word() -> None:
    texts = ["_cat_ in New\nYork", "**Cat**, New  York", "cats in new_york", "a_cat of Newark"]
    assert score("keyword_match", texts, {"keywords": ["New York", "cat"]}) == [1.0, 1.0, 0.0, 0.0]


def test_keywords_of_a_column_are_those_of_each_item() -> None:
    assert score("keyword_match", ["a b", "z a"], {"keywords": ["a", "z"]}) == [0.5, 1.0]
    for words, scores in (("a, b", [1.0, 0.0]), (None, [1.0, 1.0])):
        assert score("keyword_match", ["a b", "c"], {"words": words}, args={"keyword_field": "words"}) == scores
    with pytest.raises(ConfigError, match="Columns: answer"):
        score("keyword_match", ["a"], {"answer": "1"})


@pytest.mark.parametrize("completion", [GOOD, GOOD.replace("\n", ""), f"  {GOOD}"])
def test_strict_format_scores_one_for_the_exact_form(completion: str) -> None:
    assert score("strict_format", [completion], {}) == [1.0]


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
    assert score("strict_format", [completion], {}) == [0.0]


def test_strict_format_takes_other_tags() -> None:
    completion = "<think>hm</think><answer>2</answer>"
    assert score("strict_format", [completion], {}, args={"reasoning_tag": "think"}) == [1.0]
    assert score("strict_format", [completion], {}) == [0.0]


def test_regex_searches_or_matches_the_whole_text() -> None:
    texts = ["say 42\nnow", "42", "forty"]
    assert score("regex", texts, {}, args={"pattern": r"\d+"}) == [1.0, 1.0, 0.0]
    assert score("regex", texts, {}, args={"pattern": r"\d+", "mode": "fullmatch"}) == [0.0, 1.0, 0.0]
    assert score("regex", texts, {}, args={"pattern": "say.*NOW", "ignore_case": True}) == [1.0, 0.0, 0.0]


def test_regex_takes_its_pattern_from_a_column() -> None:
    assert score("regex", ["ab", "b"], {"form": "^a"}, args={"pattern_field": "form"}) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pattern": "("}, "is not one of Python's"),
        ({}, "no column 'pattern'. Columns: none"),
    ],
)
def test_regex_refuses_what_it_cannot_match(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        score("regex", ["a"], fields)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "wanted"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('Here you are:\n```json\n{"name": "Ada", "age": 36}\n```\nDone.', 1.0),
        ('```\n{}\n```\n```json\n{"name": "Ada", "age": 0}\n```', 1.0),
        ('<answer>{"name": "Ada", "age": 36}</answer>', 1.0),
        ('{"name": "Ada", "age": -1}', 0.25),
        ('{"name": "Ada"}', 0.25),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "age": 36} and more', 0.0),
        ("Ada, 36", 0.0),
        ("", 0.0),
        ("[" * 200_000, 0.0),
    ],
)
def test_json_follows_its_schema_or_only_parses_or_neither(completion: str, wanted: float) -> None:
    assert score("json_schema", [completion], {}, args={"schema": PERSON, "partial": 0.25}) == [wanted]
    args = {"schema_field": "form", "partial": 0.25}
    assert score("json_schema", [completion], {"form": json.dumps(PERSON)}, args=args) == [wanted]


def test_a_fence_that_never_closes_costs_no_time() -> None:
    begun = time.process_time()
    assert score("json_schema", ["```" + "\n" * 30_000], {}, args={"schema": PERSON}) == [0.0]
    assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("schema", ["{", '{"type": "texts"}', {"minimum": "1"}])
def test_a_schema_that_is_none_is_an_error(schema: Any) -> None:
    with pytest.raises(ConfigError, match="no JSON schema"):
        score("json_schema", ["1"], {"form": schema}, args={"schema_field": "form"})


def test_a_reference_in_a_schema_is_not_fetched() -> None:
    with pytest.raises(Exception, match="Unresolvable"):
        score("json_schema", ["1"], {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}})


def test_length_above_the_most_falls_in_a_straight_line() -> None:
    texts = ["w " * count for count in (0, 10, 15, 20, 100)]
    assert score("length", texts, {}, args={"most": 10, "over": 10}) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert score("length", ["abcd"], {}, args={"most": 2, "unit": "characters"}) == [-1.0]


def test_length_near_its_target_is_better() -> None:
    assert score("length", ["w " * count for count in (10, 5, 20, 30)], {}, args={"target": 10}) == [1, 0.5, 0, 0]


def test_repetition_is_the_share_of_ngrams_seen_before() -> None:
    texts = ["a b c d", "a b c a b c", "no no no no no", "one two", ""]
    assert score("repetition", texts, {}) == pytest.approx([0.0, -0.25, -2 / 3, 0.0, 0.0])
    assert score("repetition", ["a a b"], {}, args={"ngram": 1}) == pytest.approx([-1 / 3])
