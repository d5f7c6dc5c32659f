from __future__ import annotations

import builtins
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym as package

from hpc_grpo import rewards
from hpc_grpo.config import RewardConfig, SourceConfig
from hpc_grpo.data.sources import read_items
from hpc_grpo.errors import ConfigError
from hpc_grpo.grading.pool import RewardPool
from hpc_grpo.rewards.builtin.reasoning_gym import evaluate
from hpc_grpo.rewards.scoring import ScoringError
from tests.support.isolation import needs_isolation


def score(item: dict[str, Any], *completions: str, **args: Any) -> list[float]:
    return rewards.score("reasoning_gym", completions, item, args=args)


@functools.cache  # a process for each
def first_item(task: str) -> dict[str, Any]:
    return next(read_items(SourceConfig(path=f"reasoning_gym:{task}", args={"size": 1})))


def test_an_answer_scores_wherever_it_is_marked() -> None:
    item = first_item("gcd")
    right = item["answer"]
    marked = [right, f"so <answer>{right}</answer>", f"it is \\boxed{{{right}}}.", f"#### {right}", "#### 0", ""]
    assert score(item, *marked) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_a_scorer_that_raises_over_a_wrong_answer_scores_it_zero() -> None:
    item = first_item("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        package.create_dataset("prime_factorization").score_answer("I do not know", item)
    assert score(item, "I do not know", item["answer"]) == [0.0, 1.0]


def test_a_scorer_that_raises_over_its_own_answer_fails() -> None:
    with pytest.raises(ScoringError, match="raises over the row's own answer 'seven'"):
        score({**first_item("prime_factorization"), "answer": "seven"}, "I do not know")


def test_a_grid_of_tuples_is_scored_as_its_task_made_it() -> None:
    """Through plain JSON its tuples became lists, which the scorer never finds equal."""
    item = first_item("rearc")
    assert score(item, item["answer"]) == [1.0]


def test_partial_scores_can_be_refused() -> None:
    item = first_item("gcd")
    hedged = f"\\boxed{{{item['answer']} or 77}}"
    [some] = score(item, hedged)
    assert 0.0 < some < 1.0
    assert score(item, hedged, item["answer"], partial=False) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "gdc"}, "There is no task 'gdc'; did you mean 'gcd'"),
        ({"task_args": '{"sizes": 3}'}, "TypeError: .*'sizes'"),
    ],
)
def test_a_row_of_a_task_that_does_not_exist_is_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        score({**first_item("gcd"), **changes}, "1")


def test_other_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="rows of reasoning_gym:TASK alone"):
        score({"answer": "1"}, "1")


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    """The workers of training, which have a secret; a completion gets less time than by default."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_API_KEY", "planted-8c1e")
        pool = RewardPool([RewardConfig(name="reasoning_gym", timeout_s=60.0, args={"time_s": 1.0})], num_workers=1)
        [note] = pool.check()
    assert "isolated by" in note
    yield pool
    pool.close()


@needs_isolation
@pytest.mark.parametrize(
    "task",
    [
        *("string_insertion", "n_queens", "binary_matrix", "spiral_matrix", "countdown"),
        *("simple_integration", "polynomial_multiplication", "puzzle24"),
    ],
)
def test_an_answer_that_is_code_is_not_run_outside_the_sandbox(task: str, pool: RewardPool, tmp_path: Path) -> None:
    """These scorers evaluate the answer."""
    item = first_item(task)
    write = f"__import__('os').system('env > {tmp_path}/written; id >> {tmp_path}/written')"
    forge = "[f for f in (1).__class__.__base__.__subclasses__()]"
    texts = [
        item["answer"] or "0",
        *(f"<answer>{text}</answer>" for text in (write, forge, f"[{write}]", "9**9**9**9")),
    ]
    outcome = pool.submit(item["question"], texts, item).result()
    assert outcome.errors == ()
    assert list(tmp_path.iterdir()) == []
    right, *attacks = outcome.rewards
    assert max(attacks) <= 0.05 and (right == 1.0 or not item["answer"])


@needs_isolation
def test_fifteen_power_towers_do_not_mask_their_group(pool: RewardPool) -> None:
    item = first_item("countdown")
    outcome = pool.submit(item["question"], ["9**9**9**9"] * 15 + [item["answer"]], item).result()
    assert (outcome.errors, outcome.valid, outcome.rewards[:15]) == ((), (True,) * 16, (0.0,) * 15)
    assert outcome.rewards[15] == 1.0


SYMPY: dict[str, Any] = {}
exec("from sympy import *", SYMPY)


@pytest.mark.parametrize("local", [{}, {"x": SYMPY["Symbol"]("x")}], ids=["numbers", "variable"])
@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os')", "().__class__", "open('x')", "[x for x in (1,)]", "lambda: 0", "lambdify('x', 'x')"),
        *("exec('1')", "eval('1')", "getattr(1, 'real')", "f'{1}'", "(y := 1)", "globals()", "sympify('1')"),
        *("print(1)", "True + True", "sum([])", "Integral(x, x)", "integrate(x, x)", "None"),
    ],
)
def test_what_scorers_evaluate_is_an_expression(text: str, local: dict[str, Any]) -> None:
    names = {**vars(builtins), **SYMPY}  # as sympy's parser has them
    with pytest.raises(ValueError, match="an answer is an expression"):
        evaluate(text, names, local)


def test_an_expression_that_asks_for_certain_numbers_has_no_others() -> None:
    for text in ("ceiling(pi)", "E", "factorial(Integer(3))"):
        with pytest.raises(ValueError, match="an answer is an expression"):
            evaluate(text, SYMPY, {})


def test_expressions_are_evaluated_as_python_does() -> None:
    x = {"x": SYMPY["Symbol"]("x")}
    for text in ("[1, (2, -3)]", "'a' + 'b'", "Integer(2)**Symbol('x')"):
        assert evaluate(text, SYMPY, {}) == eval(text, SYMPY)
    assert evaluate("sqrt(Rational(1, 2))*pi + exp(x) + Max(x, 1)", SYMPY, x) == eval(
        "sqrt(Rational(1, 2))*pi + exp(x) + Max(x, 1)", SYMPY, x
    )
    assert evaluate("max(1, 2) == abs(-2)")
