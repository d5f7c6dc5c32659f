from __future__ import annotations

import time
from fractions import Fraction

import pytest

from hpc_grpo.rewards import score
from hpc_grpo.rewards.answers import final_answer, last_boxed, last_number, parse_number


def is_correct(completion: str, reference: str) -> bool:
    return score("math", [completion], {"answer": reference}, args={"completion_s": 10.0}) == [1.0]


@pytest.mark.parametrize(
    ("completion", "reference"),
    [
        ("The answer is 42.", "#### 42"),
        ("The answer is:\n\\[\n12\n\\]\nCheck: 3 * 4.", "12"),
        ("The answer is 3.5 hours, or 210 minutes.", "3.5"),
        ("The answer is 12 cm^2.", "12"),
        ("The answer is 12 cm^{3}.", "12"),
        (r"\textbf{Answer:} \frac{3}{4}", r"\frac{3}{4}"),
        ("The answer is 42.", "2 * 21 = <<2*21=42>>42\n#### 42"),
        ("It costs $1,234.50", "1234.5"),
        ("1,234,567", "1234567"),
        ("about 50%", "50"),
        (r"that is 50\% of it", "50%"),
        ("x = 0.5", "1/2"),
        ("1/2", "0.50"),
        ("1 / 2", "0.5"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{-\dfrac{3}{4}}", "-0.75"),
        (r"\boxed{\frac{-3}{4}}", "-3/4"),
        (r"\boxed{\frac12}", "1/2"),
        (r"thus $\frac{3}{4}$.", "0.75"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"\boxed{42} since 42 > 7", "42"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{5\text{ cm}}", "5"),
        (r"\boxed{90^\circ}", "90"),
        (r"\boxed{1{,}000}", "1000"),
        (r"\boxed{\text{Paris}}", "paris"),
        (r"\boxed{(x+1)^{2}}", "(x + 1)^{2}"),
        (r"\boxed{42", "42"),
        ("<reasoning>7</reasoning><answer>42</answer> 9", "42"),
        ("work\n#### 42\n\nQuestion: 7", "42"),
        ("= \u22125", "-5"),
        ("-5", "-5.0"),
        ("+7", "7"),
        ("it is .5", "0.5"),
        ("1.5e3", "1500"),
        ("I think:\nParis.", "Paris"),
        ("42", "\\boxed{42}"),
        ("5-3=2", "2"),
        ("The answer is 42. I hope 1 of you is happy.", "42"),
        ("Answer: She sold 48/2 = 24 clips in May.\nAltogether 48+24 = 72.", "72"),
        ("**Answer:**\n\n42", "42"),
        ("Answer:\n```\n42\n```", "42"),
        ("**Final Answer:** $42$", "42"),
        ("Final answer: **42**.", "42"),
        ("The answer to the question is $\\frac{1}{2}$.", "1/2"),
        ("So the area is $2\\sqrt{3}$.", "2\\sqrt3"),
        ("2 1/2", "5/2"),
        ("2 1/2", "2.5"),
        ("\\boxed{x}", "x"),
        ("\\boxed{2\\frac{1}{2}}", "5/2"),
        ("The answer is 42.\n\n#### Step 2: check 7", "42"),
        ("#### Step 1: add\n40+2\n#### Step 2: done\nSo she has 42 eggs.", "42"),
        ("40+2\n#### **42**", "42"),
        ("#### Answer: 42", "42"),
        ("#### 42 eggs", "42"),
        ("So it is Paris.", "Paris"),
        ("The capital of France is **Paris**.", "paris"),
        ("The answer is Paris, not London.", "Paris"),
        ("<think>\\boxed{3}</think> It is 4.", "4"),
        ("\u7b54\u6848\u662f 42\u3002", "42"),
        ("The answer is \u0664\u0662.", "42"),
        ("The answer is \uff14\uff12\u3002", "42"),
        ("- 42", "42"),
        ("1. First\n2. **42**", "42"),
        ("It is $10^3$.", "1000"),
        ("The answer is 2 hours", "2"),
        ("The answer is 5m.", "5"),
        ("x = 5, x = 6", "6"),
        ("The total is 5 + 3 = 8.", "8"),
        ("The answer is 5 + 3 = 8.", "8"),
        ("42 (forty-two)", "42"),
        ("The answer is 42 (forty-two).", "42"),
        ("The answer is not 5. It is 6.", "6"),
        ("The answer isn't 5, it's 6.", "6"),
        ("Answer: 42\n\nQuestion: What is 7+8?", "42"),
        ("The answer is $\\sqrt{8}$.", "2\\sqrt2"),
        ("First.\nThe answer is $\\sqrt{8}$.", "2\\sqrt{2}"),
        ("\\boxed{\\text{Paris}}", "paris"),
        ("So $x^2 = 16$ gives $x = 4$.", "4"),
        ("You need 3/4 cup.", "0.75"),
        ("\\[\n42\n\\]", "42"),
        ("Therefore:\n\\[ x = 42 \\]", "42"),
        ("so $$42$$", "42"),
        ("The answer is\r\n42\r\n", "42"),
        ("It is 1,234 km", "1234"),
        ("The answer is 1 234.", "1234"),
        ("There are 12 eggs, and 12 / 2 = 6. \n\nSo the answer is 6 eggs per person.", "6"),
        ("The final answer is: $\\boxed{6}$", "6"),
        ("\\fbox{7}", "7"),
        ("it equals 5%", "5"),
        ("3.", "3"),
        ("Let's see. 7 * 6 = 42.\n\nI hope this helps!", "42"),
        ("$42", "42"),
        ("It's 42!", "42"),
        ("The answer is 5!", "5"),
        ("-7", "-7"),
        ("The answer is \u22127", "-7"),
        ("The result is - 7", "7"),
        ('The answer is "New York".', "New York"),
        ("The answer is New York because of it.", "New York"),
        ("The answer is St. Louis.", "St. Louis"),
        ("`42`", "42"),
        ("<answer>The GCD is 4.</answer>", "4"),
        ("<answer>\n**4**\n</answer>", "4"),
        ("The answer is x. I hope it helps.", "x"),
        ("The answer is no. The sum is odd.", "no"),
        ("The answer is 45a. Option Z is wrong.", "45a"),
        ("The answer is x^2 + C. It is so.", "x^2 + C"),
        ("The answer is St. Louis. It is large.", "St. Louis"),
        ("The answer is B. Option Z is wrong.", "B"),
        ("**Final Answer:** **J. K. Rowling**", "J. K. Rowling"),
        ("The answer is J. K. Rowling. She wrote it.", "J. K. Rowling"),
        ("The answer is 6? No, 7.", "7"),
        ("It is 10^3", "1000"),
        ("It is 5\u00b2.", "25"),
        ("The area is 10 m\u00b2.", "10"),
        ("x\u00b2 + 1", "x^2+1"),
        ("The answer is 2\u221a2.", "2\\sqrt{2}"),
        ("(-\u221e, 2]", "(-\\infty,2]"),
        ("6.02 \u00d7 10^23 atoms", "6.02e23"),
        (r"\boxed{6.02\times10^{23}}", "602000000000000000000000"),
        ("3 \u00d7 10\u207b\u00b3", "0.003"),
    ],
)
def test_an_equal_answer_is_correct(completion: str, reference: str) -> None:
    assert is_correct(completion, reference)


@pytest.mark.parametrize(
    ("completion", "reference"),
    [
        ("41", "42"),
        ("", "42"),
        ("no idea", "42"),
        ("42 or 43", "42"),
        ("The answer is $$42$$ or $$43$$", "42"),
        ("The answer is 42, or 43.", "42"),
        ("The answer is 3.5 hours, or 210 minutes.", "210"),
        (r"\boxed{41} 42", "42"),
        (r"\boxed{5 or 6}", "6"),
        (r"\boxed{x^2}", "2"),
        (r"\boxed{}", "42"),
        ("5-3", "-3"),
        ("0.333", "1/3"),
        ("1/0", "0"),
        ("1,2", "12"),
        ("Paris is not London", "London"),
        ("", "Paris"),
        ("<answer>41</answer> 42", "42"),
        ("42e9999", "42"),
        ("The answer is 42 or 43", "43"),
        ("The answer is $2\\sqrt{3}$.", "3"),
        ("So the area is $2\\sqrt{3}$.", "3"),
        ("21/2", "2 1/2"),
        ("123", "1 2 3"),
        ("\\boxed{X}", "x"),
        ("Paris is not London", "London"),
        ("The answer is Paris, not London.", "London"),
        ("<think>\\boxed{4}</think> It is 3.", "4"),
        ("<think>4</think>", "4"),
        ("The answer is $x^2$", "2"),
        ("It is x^2", "2"),
        ("It is 10^3.", "3"),
        ("The answer is 3x", "3"),
        ("The answer is x = 5 or x = 6", "6"),
        ("The answer is not 5. It is 6.", "5"),
        ("5 or 6", "6"),
        ("**5** or **6**", "6"),
        ("It is 5\u00b2.", "5"),
        ("It is 3 x 10^2.", "10"),
    ],
)
def test_another_answer_is_wrong(completion: str, reference: str) -> None:
    assert not is_correct(completion, reference)


@pytest.mark.parametrize(
    "surrounding",
    [
        *("{}", "<answer>\n{}\n</answer>", "So:\n```text\n{}\n```\nDone.", "We add.\n\n**Answer:**\n\n{}\n\nDone."),
        *("The answer is {}.", "It is as follows:\n{}", "We add.\n\n{}", "The answer is:\r\n{}\r\n"),
    ],
)
@pytest.mark.parametrize(
    ("reference", "other"), [("1 0\n0 1", "1 0\n1 0"), ("a < b\n\n. .", "a > b\n\n. ."), ("Go up.\nEnd.", "End.")]
)
def test_an_answer_of_several_lines_is_found(surrounding: str, reference: str, other: str) -> None:
    assert final_answer(surrounding.format(reference), reference) == reference
    assert final_answer(surrounding.format(other), reference) != reference


@pytest.mark.parametrize("reference", ["...", "***", "...\n..."])
def test_nothing_is_no_answer(reference: str) -> None:
    assert final_answer("", reference) == final_answer(r"\boxed{}", reference) == ""
    assert score("exact", ["", r"\boxed{}", reference], {"answer": reference}) == [0.0, 0.0, 1.0]


def test_numbers_and_boxes_are_found_in_text() -> None:
    assert parse_number("-1,000.25") == Fraction(-4001, 4)
    assert parse_number("1 2") is None
    assert last_number("3 apples and 4/6 of a pear") == Fraction(2, 3)
    assert last_boxed(r"\boxed{a\}b}") == r"a\}b"
    assert last_boxed(r"\boxed{\boxed{5}}") == "5"
    assert last_boxed("}{ no box }") is None


@pytest.mark.parametrize(
    "degenerate",
    [
        "9" * 20_000,
        r"\boxed{" * 3_000,
        "1e" * 10_000,
        "1e999" * 4_000,
        "1/" * 10_000,
        "<answer>" * 3_000,
        "####" * 5_000,
        "1," * 10_000,
        r"\frac{" * 4_000,
        "1 " * 10_000,
        "{" * 20_000,
        " " * 20_000,
        "1.1" * 7_000,
        "\\frac" + " " * 20_000,
        "1" + " " * 20_000 + "x",
        "a= " * 7_000,
    ],
)
def test_degenerate_completions_are_graded_quickly(degenerate: str) -> None:
    start = time.process_time()
    assert not is_correct(degenerate, "42")
    assert not is_correct(degenerate, "Paris")
    assert time.process_time() - start < 2.0
