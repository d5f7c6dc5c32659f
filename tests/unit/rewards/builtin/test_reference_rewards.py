"""Rewards that compare with a reference: gsm8k, multiple_choice, string_f1."""

from __future__ import annotations

from typing import Any

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import score

GSM8K = "She sold 48/2 = <<48/2=24>>24 clips in May.\nTogether 48+24 = <<48+24=72>>72.\n#### 72"


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        ("48 + 24\n#### 72", 1.0, 1.0),
        ("#### $72.00", 1.0, 1.0),
        ("The answer is 72.", 0.0, 1.0),
        ("#### 71", 0.0, 0.0),
        ("#### seventy-two", 0.0, 0.0),
        ("#### 72 clips", 1.0, 1.0),
        ("#### **72**", 1.0, 1.0),
        ("#### Step 2: add\n48 + 24\n#### 72", 1.0, 1.0),
        ("#### \\boxed{72}", 1.0, 1.0),
        ("#### 72 or 73", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_gsm8k_strict_wants_the_mark_and_flexible_the_last_number(
    completion: str, strict: float, flexible: float
) -> None:
    assert score("gsm8k", [completion], {"answer": GSM8K}) == [strict]
    assert score("gsm8k", [completion], {"answer": GSM8K}, args={"method": "flexible"}) == [flexible]


def test_gsm8k_refuses_a_reference_without_number() -> None:
    with pytest.raises(ConfigError, match="Use the reward math"):
        score("gsm8k", ["1"], {"answer": "Paris"})


@pytest.mark.parametrize(
    ("completion", "choice"),
    [
        ("B", "B"),
        ("(B)", "B"),
        ("B. Paris", "B"),
        ("B) A large city", "B"),
        ("\\boxed{B}", "B"),
        ("\\boxed{\\text{(B)}}", "B"),
        ("A is wrong. \\boxed{B. A large city}", "B"),
        ("<answer> (B) </answer>", "B"),
        ("Option A looks right, but the answer is B.", "B"),
        ("The correct answer: **B**", "B"),
        ("answer is (B) since the answer is not A", "B"),
        ("So I choose B, thus final choice: B", "B"),
        ("A large city lies there.", None),
        ("I think it may be B or C", None),
        ("\\boxed{A or B}", None),
        ("\\boxed{Paris}", None),
        ("", None),
        ("The answer is Berlin.", None),
        ("The answer is F.", None),
        ("The answer is B. Option A is wrong because x.", "B"),
        ("The answer is C, not option D.", "C"),
        ("A is incorrect. B is correct.", "B"),
        ("Option C is the correct answer.", "C"),
        ("I would choose B.", "B"),
        ("I'd go with (B).", "B"),
        ("My choice is D", "D"),
        ("The correct option is A.", "A"),
        ("Therefore, B.", "B"),
        ("Answer: (C)", "C"),
        ("**B**", "B"),
        ("The best answer is therefore B", "B"),
        ("The answer is option B", "B"),
        ("The answer is: Option (B)", "B"),
        ("The answer is the letter B.", "B"),
        ("Correct answer: B) 42", "B"),
        ("The answer is not A but B.", None),
        ("The answer is A or B.", None),
        ("The answer is A and C.", None),
        ("So the answer is A? No, it is B.", "B"),
        ("ANSWER: B", "B"),
        ("The answer isn't A; the answer is C.", "C"),
        ("The answer cannot be A, so it must be B.", "B"),
        ("The correct answer is A: Paris", "A"),
        ("A) 3\nB) 4\nC) 5", None),
        ("A) 3 is too small.\nB) 4 is right.\nC) 5 is large.\n\nThe answer is B.", "B"),
        ("Let us see.\n\nB", "B"),
        ("Let us see.\n\n**Answer: B**", "B"),
        ("b", "B"),
        ("The answer is b.", "B"),
        ("answer: (b)", "B"),
        ("The answer is a large city.", None),
        ("The answer is A large city.", None),
        ("The answer is A because it fits.", "A"),
        ("The answer is: B\n\nExplanation: Option A is a city. Option C is a river.", "B"),
        ("The answer is **(B) Paris**, as A and C are rivers.", "B"),
        ("<think>The answer is A.</think>The answer is B.", "B"),
        ("The answer is \uff22.", "B"),
        ("$B$", "B"),
        ("The answer is $\\boxed{B}$.", "B"),
        ("Answer:\nB", "B"),
        ("Answer:\n\n(B) 4", "B"),
        ("The final answer is (B).", "B"),
        ("### Answer: B", "B"),
        ("#### B", "B"),
        ("The correct answer is B) because A) is wrong", "B"),
        ("Based on this, option B is correct, while option A is not.", "B"),
        ("B is the best choice here, and A is wrong", "B"),
        ("A, B and C are wrong, so D.", None),
        ("The answer to the question is B.", "B"),
        ("I pick (B).", "B"),
        ("Option D.", "D"),
        ("Choice A.", "A"),
        ("\\boxed{A, B}", None),
        ("The answer is A, B.", None),
        ("The answer is A/B", None),
        ("The answer is B, A is wrong.", "B"),
        ("I don't choose A. I choose B.", "B"),
        ("The answer → B", "B"),
        ("B because it is the capital.", None),
        ("B, because A is wrong.", "B"),
        ("The answer is \u201cB\u201d.", "B"),
        ("Option A is the population. Thus the answer is: B", "B"),
        ("Which one? The answer is D! Not A.", "D"),
        ("Selected answer: C", "C"),
        ("The right choice would be C.", "C"),
        ("The answer should be C.", "C"),
        ("```\nB\n```", "B"),
        ("- B", "B"),
        ("1. B", None),
        ("Paris", None),
        ("Answer: B (Paris), since option C is a river", "B"),
        ("The answer is: A) Paris. B) is wrong because it is small.", "A"),
        ("Looking at A, it is wrong. Thus B.", "B"),
        ("The answer is 'C'.", "C"),
        ("The answer is {D}", "D"),
        (r"The answer is \(B\).", "B"),
        (r"The correct choice is \[C\]", "C"),
        (r"\[ B \]", "B"),
        (r"The answer is \(A \cup B\).", None),
        ("The correct answer is **Option B**.", "B"),
        ("The correct answer is **option B: Paris**.", "B"),
        ("It is D because it fits.", "D"),
        ("=> D", "D"),
        ("\u7b54\u6848\u662f (D)\u3002", "D"),
    ],
)
def test_the_chosen_letter_is_the_marked_or_announced_one(completion: str, choice: str | None) -> None:
    scores = {letter: score("multiple_choice", [completion], {"answer": letter})[0] for letter in "ABCDE"}
    assert [letter for letter, one in scores.items() if one] == ([choice] if choice else [])


def test_exact_compares_texts() -> None:
    """`correctness` means that in the system which it comes from; here it is `math`."""
    completions = ["0.5", " 0.5\r\n", r"It is \boxed{0.5}", "The answer is 0.5.", "1/2", "0.50", "It is 0.5"]
    assert score("exact", completions, {"answer": "0.5"}) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert score("exact", ["Yes", "yes", ""], {"answer": "Yes"}) == [1.0, 0.0, 0.0]
    assert score("exact", [""], {"answer": ""}) == [0.0]


@pytest.mark.parametrize("reference", ["Yes", "U.S.", '"hi"', "one\ntwo", "f(x) = `y`"])
def test_marks_around_an_exact_answer_do_not_count(reference: str) -> None:
    marked = [
        f"**{reference}**",
        f"```\n{reference}\n```",
        f"\\boxed{{\\text{{{reference}}}}}",
        f"<answer>{reference}</answer>",
    ]
    assert score("exact", marked, {"answer": reference}) == [1.0] * 4
    assert score("exact", marked, {"answer": "no"}) == [0.0] * 4


@pytest.mark.parametrize("reference", ["B", "b", "(B)", "B.", 1, "1"])
def test_the_reference_is_a_letter_or_its_number(reference: Any) -> None:
    assert score("multiple_choice", ["B", "A"], {"answer": reference}) == [1.0, 0.0]


@pytest.mark.parametrize("reference", ["G", 7, "Paris"])
def test_a_reference_that_is_no_choice_is_an_error(reference: Any) -> None:
    with pytest.raises(ConfigError, match="none of the letters ABCDE"):
        score("multiple_choice", ["B"], {"answer": reference})


@pytest.mark.parametrize(
    ("completion", "reference", "f1"),
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("Eiffel", "Eiffel Tower", 2 / 3),
        ("the big big dog", "big dog", 4 / 5),
        ("I guess: <answer>Paris</answer>", "paris", 1.0),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
        ("New York City", ["NYC", "New York"], 4 / 5),
        (r"\boxed{\text{Eiffel Tower}}", "Eiffel Tower", 1.0),
    ],
)
def test_string_f1_is_that_of_squad(completion: str, reference: Any, f1: float) -> None:
    assert score("string_f1", [completion], {"answer": reference}) == [pytest.approx(f1)]


@pytest.mark.parametrize("name", ["math", "gsm8k", "multiple_choice", "string_f1"])
def test_a_missing_reference_names_the_fix(name: str) -> None:
    with pytest.raises(ConfigError, match="answer_field"):
        score(name, ["1"], {"level": 3})
