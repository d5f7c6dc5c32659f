"""The instructions of IFEval: each followed and not, strict and loose."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from hpc_grpo import rewards
from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards.builtin.ifeval import _CHECKS

Case = tuple[str, dict[str, Any], str, str]

CASES: list[Case] = [
    ("keywords:existence", {"keywords": ["Moon", "c++"]}, "The moon in C++.", "The moon."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"}, "Tea, tea.", "Tea."),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "less than"}, "Tea.", "Tea, tea."),
    ("keywords:forbidden_words", {"forbidden_words": ["art"]}, "A party.", "Art is long."),
    ("keywords:letter_frequency", {"letter": "A", "let_frequency": 3, "let_relation": "at least"}, "Banana", "A ban"),
    (
        "language:response_language",
        {"language": "de"},
        "Das Wetter ist heute sehr schön.",
        "The weather is nice today.",
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One.\n***\nTwo.\n***", "One.\n\nTwo."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "One.***Two.", "One.******Two."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "Two words.", "Now it's more."),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "Dr. Smith left. He was tired.",
        "Dr. Smith left for the U.S. Navy.",
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Weekend"},
        "First.\n\n'Weekend's here.",
        "Weekend.\n\nFirst.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name], [address]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP.S. More.", "Bye. PS more."),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP. P. S: more.", "Bye.\nP.S. More."),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* One\n- Two", "* One\n**Two**"),
    ("detectable_format:constrained_response", {}, "Well: My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*one* and *two*", "*one* and * *"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\nA\nSECTION 2\nB",
        "Section 1\nA\nSection 2\nB",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "a: 1"),
    ("detectable_format:title", {}, "<<Poem of joy>>\nText", "<< >>\nText"),
    ("combination:two_responses", {}, "One.\n******\nTwo.", "One.\n******\nOne."),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Name a fruit."}, "name a fruit. Pear.", "Pear. Name a fruit."),
    ("startend:end_checker", {"end_phrase": "Any other questions?"}, 'So. "Any other questions?"', "Questions?"),
    ("startend:quotation", {}, ' "All of it." ', '"Not" all.'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NASA and the U.S. agree.",
        "Nasa and the U.S. agree.",
    ),
    ("change_case:english_capital", {}, "THIS IS ALL IN CAPITAL LETTERS.", "This is not in capital letters."),
    ("change_case:english_lowercase", {}, "this is all in lower case letters.", "das ist alles klein geschrieben."),
    ("punctuation:no_comma", {}, "No comma here.", "One, here."),
]


def score(texts: list[str], names: list[str], arguments: list[dict[str, Any]], **options: Any) -> list[float]:
    return rewards.score("ifeval", texts, {"instruction_id_list": names, "kwargs": arguments}, args=options)


def test_every_instruction_of_the_paper_has_a_case() -> None:
    assert len(_CHECKS) == 25
    assert {name for name, *_ in CASES} == set(_CHECKS)


@pytest.mark.parametrize(("name", "arguments", "followed", "broken"), CASES)
def test_a_text_that_follows_an_instruction_scores_1_and_another_0(
    name: str, arguments: dict[str, Any], followed: str, broken: str
) -> None:
    # A data set of tables has a column for each argument of any instruction, null where it has none.
    padded = {"num_words": None, "keywords": None, **arguments}
    assert score([followed, broken], [name], [padded]) == [1.0, 0.0]


def test_all_instructions_must_be_followed_unless_the_share_is_asked_for() -> None:
    names, arguments = ["punctuation:no_comma", "startend:quotation"], [{}, {}]
    texts = ['"Both"', '"One, only"', "Neither, nor"]
    assert score(texts, names, arguments) == [1.0, 0.0, 0.0]
    assert score(texts, names, arguments, partial=True) == [1.0, 0.5, 0.0]


def test_loose_forgives_an_introduction_a_closing_line_and_asterisks() -> None:
    texts = ['Sure!\n"It is so."', '"It is so."\nAnything else?', 'Sure!\n**"It is so."**\nBye.', "It is so."]
    assert score(texts, ["startend:quotation"], [{}]) == [0.0, 0.0, 0.0, 0.0]
    assert score(texts, ["startend:quotation"], [{}], mode="loose") == [1.0, 1.0, 1.0, 0.0]


def test_an_empty_completion_follows_nothing_and_thoughts_are_not_judged() -> None:
    texts = ["", "  ", "<think>One, two.</think>", "<think>One, two.</think> Three."]
    for mode in ("strict", "loose"):
        assert score(texts, ["punctuation:no_comma"], [{}], mode=mode) == [0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("names", "arguments", "options", "message"),
    [
        (["punctuation:no_dots"], [{}], {}, "there is no instruction 'punctuation:no_dots'. There are: change_case:"),
        (
            ["startend:end_checker"],
            [{"end_phrase": None}],
            {},
            "the arguments of startend:end_checker are {}. end_phrase: Missing required argument",
        ),
        (["startend:quotation"], [{}, {}], {}, "need a mapping of arguments each"),
        ([], [], {}, "need a mapping of arguments each"),
        (
            ["startend:quotation"],
            [{}],
            {"kwargs_field": "args"},
            "no column 'args'. Columns: instruction_id_list, kwargs. Set rewards.N.args.kwargs_field",
        ),
        (
            ["keywords:frequency"],
            [{"keyword": "a", "frequency": 1, "relation": "more than"}],
            {},
            "relation: must be 'less than' or 'at least'",
        ),
        (["keywords:existence"], [{"keywords": "tea"}], {}, "'str' instances are not allowed as a Sequence value"),
    ],
)
def test_an_item_that_cannot_be_judged_is_an_error_and_no_score(
    names: list[str], arguments: list[dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        score(["text"], names, arguments, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("detectable_format:number_bullet_lists", {"num_bullets": 1}),
        ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ],
)
def test_a_completion_of_white_space_takes_no_time(name: str, arguments: dict[str, Any]) -> None:
    start = time.process_time()
    assert score(["x" + "\n" * 100_000 + " " * 100_000 + "x"], [name], [arguments]) == [0.0]
    assert time.process_time() - start < 2.0


def test_it_works_where_no_socket_can_be_opened() -> None:
    program = """if True:
        import socket
        def refuse(*_, **__): raise OSError("no network here")
        socket.socket.connect = socket.getaddrinfo = refuse
        from hpc_grpo.rewards import score
        names = ["language:response_language", "length_constraints:number_sentences"]
        arguments = [{"language": "en"}, {"num_sentences": 2, "relation": "at least"}]
        row = {"instruction_id_list": names, "kwargs": arguments}
        print(score("ifeval", ["This is one. And this is two."], row))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("[1.0]\n", 0), done.stderr
