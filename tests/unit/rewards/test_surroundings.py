"""What a reward must not depend on: a right answer scores its best in eleven surroundings, a wrong one its worst.

Through the reward worker, with the settings and columns that a config has by default. Run with `-s` to see the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_grpo.config import RewardConfig
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.registry import REWARDS
from tests.support.isolation import needs_isolation
from tests.support.stand_in_server import Reply, Serve

REPOSITORY = Path(__file__).parents[3]
SCRIPTS = {"Arabic": 0x660, "Persian": 0x6F0, "Devanagari": 0x966, "Thai": 0xE50, "full width": 0xFF10}
FULL_WIDTH = {code: code + 0xFEE0 for code in range(ord("0"), ord("z") + 1) if chr(code).isalnum()}

Surrounding = Callable[[str, str], str]
"""Takes an answer and another answer, which is not given."""

SURROUNDINGS: dict[str, Surrounding] = {
    "prose": lambda answer, other: f"I looked at it with care. The answer is {answer}.",
    "bold": lambda answer, other: f"### Solution\n\nWe add both.\n\n**Final Answer:** **{answer}**",
    "LaTeX": lambda answer, other: rf"Therefore the result is $\boxed{{{answer}}}$.",
    "element": lambda answer, other: f"We add both. <answer>{answer}</answer>",
    "fences": lambda answer, other: f"Answer:\n```\n{answer}\n```\n",
    "display": lambda answer, other: f"We add both. The answer is:\n$$\n{answer}\n$$\n",
    "CRLF": lambda answer, other: f"We add both.\n\nThe answer is {answer}.\n".replace("\n", "\r\n"),
    "script": lambda answer, other: f"The answer is {answer}.",
    "list": lambda answer, other: f"- Read the task.\n- Add both.\n- The answer is {answer}.",
    "remark": lambda answer, other: (
        f"The answer is {answer}. Option Z is wrong because it is too far.\n\nI hope it helps!"
    ),
    "thoughts": lambda answer, other: f"<think>\nThe answer is {other}. No!\n</think>\n\nThe answer is {answer}.",
}
_BESIDE_BLOCKS: dict[str, Surrounding] = {
    "fences": lambda answer, other: f"```bash\nls\n```\n{answer}It gives:\n```text\n3\n```\n",
}
_AS_WRITTEN = "the reward compares the text as written"
_ALL_OF_IT = "the reward judges all text, thoughts included"
_ASCII = "Python and JSON allow only ASCII digits"


@dataclass(frozen=True)
class Task:
    """How one reward is asked. `pairs` draws a right and a wrong answer, `row` makes the row of the right one.

    `form` writes an answer in the form that the reward wants. `senseless` has the surroundings that are left out, with
    the reason.
    """

    pairs: st.SearchStrategy[tuple[str, str]]
    row: Callable[[str], Mapping[str, Any]]
    args: Mapping[str, Any] = field(default_factory=dict)
    form: Callable[[str], str] = str
    surroundings: Mapping[str, Surrounding] = field(default_factory=dict)
    around: Callable[[str, bool], str] = lambda text, is_right: text
    best: float = 1.0
    worst: float = 0.0
    senseless: Mapping[str, str] = field(default_factory=dict)
    examples: int = 10

    def completion(self, name: str, answer: str, other: str, script: str, is_right: bool) -> str:
        if name == "script":
            answer = in_script(answer, script)
        surrounding = {**SURROUNDINGS, **self.surroundings}[name]
        text = surrounding(self.form(answer), self.form(other))
        return self.around(text.replace("\n", "\r\n") if name == "CRLF" and "\r" not in text else text, is_right)

    def chosen(self) -> list[str]:
        return [name for name in SURROUNDINGS if name not in self.senseless]


def in_script(text: str, script: str) -> str:
    """Write digits in a script, and letters in full width, as East Asian keyboards do."""
    zero = SCRIPTS[script]
    digits = {ord("0") + digit: zero + digit for digit in range(10)}
    return text.translate(digits if re.search(r"\d", text) else FULL_WIDTH)


def distinct(values: st.SearchStrategy[str]) -> st.SearchStrategy[tuple[str, str]]:
    """Draw two texts of which neither holds the other: reasoning-gym gives a part of its score for that."""
    return st.tuples(values, values).filter(lambda pair: pair[0] not in pair[1] and pair[1] not in pair[0])


INTEGERS = st.integers(-9_999_999, 9_999_999).map(str)
COUNTS = st.integers(0, 9_999_999).map(str)
NUMBERS = st.one_of(
    INTEGERS,
    st.integers(1000, 9_999_999).map(lambda value: f"{value:,}"),
    st.decimals(-999, 999, places=2).map(str),
    st.builds("{}/{}".format, st.integers(1, 99), st.integers(2, 99)),
)
NOUNS = ["Paris", "London", "red", "iron", "Moon", "river", "Berlin", "copper"]
WORDS = st.lists(st.sampled_from(NOUNS), min_size=1, max_size=3)
PHRASES = WORDS.map(" ".join)
APART = st.permutations(NOUNS).map(lambda words: (" ".join(words[:2]), " ".join(words[2:4])))


def _value(text: str) -> float:
    top, _, bottom = text.replace(",", "").partition("/")
    return float(top) / float(bottom or 1)


UNEQUAL = st.tuples(NUMBERS, NUMBERS).filter(lambda pair: abs(_value(pair[0]) - _value(pair[1])) > 1e-9)
NOTATION = [
    *((r"2\sqrt{2}", r"2\sqrt{3}"), ("x^2 + 1", "x^2 - 1"), (r"\frac{\pi}{4}", r"\frac{\pi}{3}"), ("[0, 1)", "[0, 1]")),
    *(("(1, 2)", "(2, 1)"), (r"\{1, 2\}", r"\{1, 3\}"), ("1 2 3", "3 2 1"), ("10^{-3}", "10^{-2}"), ("x > 3", "x < 3")),
    *(("Paris", "London"), ("no", "yes"), ("B", "C"), ("3 + 4i", "4 + 3i"), (r"50\%", r"40\%"), ("1:2", "2:1")),
]
GCD = {"question": "", "task": "gcd", "task_args": "{}", "metadata": "{}"}
WISH = "keywords:existence"


def _written(text: str, is_right: bool) -> str:
    return f"<reasoning>{text}</reasoning>\n<answer>{text}</answer>" if is_right else f"<reasoning>{text}</reasoning>"


TASKS: dict[str, Task] = {
    "math": Task(UNEQUAL | st.sampled_from(NOTATION), lambda right: {"answer": right}, examples=30),
    "correctness": Task(UNEQUAL, lambda right: {"answer": right}, examples=2),
    "exact": Task(distinct(INTEGERS | PHRASES) | st.sampled_from(NOTATION), lambda right: {"answer": right}),
    "gsm8k": Task(
        distinct(INTEGERS), lambda right: {"answer": f"It is so.\n#### {right}"}, form=lambda a: f"\n#### {a}\n"
    ),
    "multiple_choice": Task(distinct(st.sampled_from("ABCDE")), lambda right: {"answer": right}),
    "string_f1": Task(APART, lambda right: {"answer": right}),
    "reasoning_gym": Task(distinct(COUNTS), lambda right: {**GCD, "answer": right}),
    "code": Task(
        distinct(COUNTS.map(lambda count: count.lstrip("0") or "0")),
        lambda right: {"tests": f"assert number() == {right}"},
        {"time_s": 20.0},
        form=lambda answer: f"\n```python\ndef number():\n    return {answer}\n```\n",
        surroundings=_BESIDE_BLOCKS,
        senseless={"script": _ASCII},
        examples=1,
    ),
    "json_schema": Task(
        distinct(INTEGERS),
        lambda right: {"schema": {"const": int(right)}},
        form=lambda answer: f"\n```json\n{answer}\n```\n",
        surroundings=_BESIDE_BLOCKS,
        senseless={"script": _ASCII},
    ),
    "regex": Task(
        distinct(COUNTS),
        lambda right: {"pattern": rf"\b{right}\b"},
        senseless={"script": _AS_WRITTEN, "thoughts": _ALL_OF_IT},
    ),
    "keyword_match": Task(
        APART,
        lambda right: {"keywords": right.split()},
        senseless={"script": _AS_WRITTEN, "thoughts": _ALL_OF_IT},
    ),
    "ifeval": Task(
        APART,
        lambda right: {"instruction_id_list": [WISH], "kwargs": [{"keywords": right.split()}]},
        senseless={"script": _AS_WRITTEN},
    ),
    "llm_judge": Task(
        distinct(COUNTS),
        lambda right: {"answer": right},
        args={"url": "URL", "model": "m"},
        senseless={"script": "the judge reads any script", "thoughts": "the judge reads thoughts too"},
    ),
    "remote": Task(
        distinct(COUNTS),
        lambda right: {"answer": right},
        args={"url": "URL"},
        senseless={"script": "the server gets the text unchanged", "thoughts": "the server gets thoughts too"},
    ),
    "length": Task(
        st.tuples(PHRASES, PHRASES.map(lambda words: f"{words} " * 100)),
        lambda right: {},
        {"most": 40},
        best=0.0,
        worst=-1.0,
        senseless={"thoughts": _ALL_OF_IT},
    ),
    "repetition": Task(
        st.tuples(st.just("red"), st.sampled_from(["iron ", "Moon "]).map(lambda word: word * 3_000)),
        lambda right: {},
        best=0.0,
        worst=-0.99,
        senseless={"thoughts": _ALL_OF_IT},
        examples=3,
    ),
    "strict_format": Task(
        distinct(PHRASES),
        lambda right: {},
        around=_written,
        senseless={"element": "an element inside an element counts as several answers"},
    ),
}


def replied(path: str, body: Any) -> Reply:
    """Stand for a server that knows the right answer, and a judge that reads nothing behind the response's mark."""
    if path.endswith("/score"):
        pairs = zip(body["fields"]["answer"], body["completions"], strict=True)
        return 200, {"scores": [float(answer in text) for answer, text in pairs]}
    if body is None:
        return 200, {"data": [{"id": "m"}]}
    question = body["messages"][0]["content"]
    reference = re.search(r"<reference>\n(.*)\n</reference>", question)
    response = re.search(r"<response>\n(.*?)\n</response>", question, re.DOTALL)
    assert reference and response
    return 200, {"choices": [{"message": {"content": f"Score: {10 * (reference[1] in response[1])}"}}]}


@pytest.fixture
def pool_of(serve: Serve) -> Iterator[Callable[[str], RewardPool]]:
    pools: list[RewardPool] = []

    def start(name: str) -> RewardPool:
        args = {key: serve(replied).url if value == "URL" else value for key, value in TASKS[name].args.items()}
        pools.append(RewardPool([RewardConfig(name=name, args=args, timeout_s=120.0)], num_workers=1))
        pools[-1].check()
        return pools[-1]

    yield start
    for pool in pools:
        with closing(pool):
            pass


def test_every_built_in_is_asked() -> None:
    assert set(TASKS) == set(REWARDS.names())


@needs_isolation
@pytest.mark.parametrize("name", TASKS)
def test_a_right_answer_scores_its_best_and_a_wrong_one_its_worst_in_every_surrounding(
    name: str, pool_of: Callable[[str], RewardPool]
) -> None:
    task, pool = TASKS[name], pool_of(name)

    @settings(max_examples=task.examples, deadline=None, derandomize=True, database=None)
    @given(pair=task.pairs, script=st.sampled_from(sorted(SCRIPTS)))
    def holds(pair: tuple[str, str], script: str) -> None:
        right, wrong = pair
        rights = {each: task.completion(each, right, wrong, script, True) for each in task.chosen()}
        wrongs = {each: task.completion(each, wrong, right, script, False) for each in task.chosen()}
        outcome = pool.submit("q", [*rights.values(), *wrongs.values()], task.row(right)).result()
        assert outcome.errors == ()
        scores = list(outcome.rewards)
        assert dict(zip(rights, scores, strict=False)) == dict.fromkeys(rights, task.best), rights
        assert {each: one for each, one in zip(wrongs, scores[len(rights) :], strict=True) if one > task.worst} == {}, (
            wrongs
        )

    holds()


def table() -> str:
    """Return the table of rewards and surroundings, with a note where one makes no sense."""
    notes = list(dict.fromkeys(reason for task in TASKS.values() for reason in task.senseless.values()))
    rows = ["| reward | best, worst | " + " | ".join(SURROUNDINGS) + " |", "|---|---|" + "---|" * len(SURROUNDINGS)]
    for name, task in TASKS.items():
        marks = [
            f"({notes.index(task.senseless[each]) + 1})" if each in task.senseless else "✓" for each in SURROUNDINGS
        ]
        rows.append(f"| `{name}` | {task.best:g}, {task.worst:g} | " + " | ".join(marks) + " |")
    return "\n".join(
        [*rows, "", *(f"({number}) {reason}" + ";."[number == len(notes)] for number, reason in enumerate(notes, 1))]
    )


def test_the_table_of_the_docs_is_that_of_the_tests() -> None:
    print(f"\n{table()}")
    assert table() in (REPOSITORY / "docs" / "rewards.md").read_text(encoding="utf-8")
