"""Built-in reward: a reasoning-gym task's score of the completion's answer, from 0.0 to 1.0.

Many tasks evaluate the answer by `eval`, or by sympy, which calls `eval`. So a scorer runs in the sandbox of `code`,
where `eval` accepts only expressions. The sandbox returns a number and nothing else.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from hpc_grpo.data.reasoning_gym import make_task, read_metadata
from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import final_answer
from hpc_grpo.rewards.sandbox.isolation import Choice, Limits, SandboxedScorer, SandboxError, describe, find_isolation
from hpc_grpo.section import Section

_COLUMNS = ("task", "task_args", "metadata", "question", "answer")
_SHARE_OF_TIMEOUT = 0.8
_START_S = 60.0
"""Seconds in which the package must be imported: it takes a few, and more on a busy node."""

_EVALUATED = (
    ast.Expression, ast.Constant, ast.Name, ast.Load, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp,
    ast.BoolOp, ast.Compare, ast.Call, ast.keyword, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
"""Syntax that answers may use. Attributes are not allowed: they lead from any value to Python's modules."""
_CALLED = frozenset({"abs", "complex", "float", "int", "list", "max", "min", "pow", "round", "set", "sum", "tuple"})
_OF_PARSER = frozenset({"Float", "Function", "Integer", "Rational", "Symbol"})
"""Names that sympy's parser creates for numbers and symbols."""


class ReasoningGymSettings(Section):
    partial: bool = Field(True, description="Keep scores between 0 and 1; false: only a full score counts.")
    isolation: Choice = Field(
        "strong", description="Where answers are scored. strong: namespaces or bubblewrap; limits: neither of them."
    )
    time_s: PositiveFloat = Field(2.0, description="Processor seconds of one completion. Beyond them it scores 0.")
    memory_mib: PositiveInt = Field(1024, description="Memory of one completion.")


def load() -> None:
    if find_spec("reasoning_gym") is None:
        raise ConfigError("the package reasoning-gym is missing. Install hpc-grpo[tasks].")
    with contextlib.suppress(ConfigError):  # `prepare` raises it, unless the settings ask for less
        _start(ReasoningGymSettings())


def prepare(settings: ReasoningGymSettings, timeout_s: float, is_resume: bool) -> str:
    """Return a description of the isolation. Raises ConfigError if it is weaker than requested."""
    _start(settings)
    return describe(find_isolation(settings.isolation))


@reward("reasoning_gym", ReasoningGymSettings, load=load, prepare=prepare)
def reasoning_gym(group: Group, settings: ReasoningGymSettings) -> Iterator[float]:
    """Score by the item's task. Without `partial`, only a full score counts.

    `answers.final_answer` finds the answer, in the form of the item's answer. A completion scores 0 if scoring it
    raises, or takes more than `time_s` of processor time. Raises RuntimeError if the item's answer raises too.
    """
    fix = "This reward scores rows of reasoning_gym:TASK alone. Name another reward."
    row = {column: group.column(column, fix) for column in _COLUMNS}
    sandbox = _sandbox(find_isolation(settings.isolation), settings.time_s, settings.memory_mib)
    wall_s = min(3.0 * settings.time_s, _SHARE_OF_TIMEOUT * group.timeout_s)

    def score(text: str) -> float | None:
        return sandbox.score(f"{__name__}:scorer", text, wall_s, **row)

    for completion in group.completions:
        found = score(final_answer(completion, row["answer"] or ""))
        # The scorer raised. Find out whether it raises only for this text: a 0 would hide a broken scorer.
        if found is not None and math.isnan(found):
            own = score(row["answer"]) if row["answer"] else None
            if own is not None and math.isnan(own):
                raise RuntimeError(f"the scorer of {row['task']} raises over the row's own answer {row['answer']!r}")
            found = None
        found = min(max(found or 0.0, 0.0), 1.0)
        yield found if settings.partial else float(found == 1.0)


@cache
def _sandbox(isolation: str, time_s: float, memory_mib: int) -> SandboxedScorer:
    return SandboxedScorer(isolation, Limits(cpu_s=time_s, memory_mib=memory_mib))


def _start(settings: ReasoningGymSettings) -> None:
    """Import the package in the sandbox: the time of a cold file system must not count for a completion."""
    sandbox = _sandbox(find_isolation(settings.isolation), settings.time_s, settings.memory_mib)
    try:
        sandbox.score(f"{__name__}:imported", "0", _START_S)
    except SandboxError as error:
        raise ConfigError(f"the sandbox cannot import the package reasoning-gym: {error}") from error


def imported() -> Callable[[str], float]:
    """Import the scorers' modules in the sandbox."""
    import reasoning_gym  # noqa: F401

    return float


def scorer(task: str, task_args: str, metadata: str, question: str, answer: str) -> Callable[[str], float]:
    """Return the scorer of an item, in the sandbox."""
    made = make_task(task, task_args)
    entry: Mapping[str, Any] = {"question": question, "answer": answer or None, "metadata": read_metadata(metadata)}

    def score(text: str) -> float:
        builtins.eval = evaluate  # type: ignore[assignment]
        try:
            return float(made.score_answer(text, entry))
        except Exception:  # noqa: BLE001 - prime_factorization, say, reads every word as a number
            return math.nan

    return score


_python_eval = eval


def evaluate(source: str, names: Any = None, local: Any = None) -> Any:
    """Evaluate an expression of literals, operators and functions, in place of `eval`.

    sympy's parser gives `names`. Mathematical functions and constants are allowed only if the task has a variable:
    other tasks ask for given numbers, and `ceiling(pi)` would add one. Raises ValueError for any other expression:
    otherwise an answer could write its own score.
    """
    caller = sys._getframe(1)
    is_task_s = names is None
    names = caller.f_globals if names is None else names
    local = (caller.f_locals if is_task_s else names) if local is None else local
    has_variable = not is_task_s and any(_is_mathematics(value) for value in local.values())
    tree = ast.parse(source.lstrip(" \t"), mode="eval")
    for node in ast.walk(tree):
        is_taken = isinstance(node, _EVALUATED)
        if isinstance(node, ast.Constant):
            is_taken = isinstance(node.value, int | float | complex | str) and not isinstance(node.value, bool)
        if isinstance(node, ast.Name) and is_task_s:
            is_taken = node.id in _CALLED
        elif isinstance(node, ast.Name):
            value = local.get(node.id, names.get(node.id))
            is_taken = node.id in _OF_PARSER or (has_variable and _is_mathematics(value))
        if not is_taken:
            raise ValueError(f"an answer is an expression, not {ast.unparse(node)!r}")
    return _python_eval(compile(tree, "<answer>", "eval"), names, local)


def _is_mathematics(value: Any) -> bool:
    """Return whether a value is a constant, variable or function of sympy's. `Integral` does not count as one."""
    import sympy

    if isinstance(value, type):
        return issubclass(value, sympy.core.function.Application)
    return isinstance(value, sympy.Basic) or getattr(value, "__module__", "").startswith("sympy.functions.")
