"""Built-in reward: runs the completion's program on unit tests, or on inputs with expected outputs, in a sandbox."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import Group, reward
from hpc_grpo.rewards.answers import answer_blocks
from hpc_grpo.rewards.sandbox.isolation import UNIT_TESTS, Choice, Limits, describe, find_isolation, run_job
from hpc_grpo.section import Section

_PYTHON = ("python", "python3", "py", "py3")
_SHARE_OF_TIMEOUT = 0.8
"""Share of `timeout_s` for a program that loops forever in each of its cases."""
_DEFINITION = re.compile(r"^(?:async def|def|class)\b", re.MULTILINE)


class CodeSettings(Section):
    tests_field: str = Field("tests", description="Column with the tests of each row.")
    with_prompt: bool = Field(False, description="Put the row's own prompt in front of the program.")
    prompt_field: str = Field("prompt", description="Column with the prompt of each row, for with_prompt.")
    partial: bool = Field(False, description="Score the share of cases that passed.")
    isolation: Choice = Field("strong", description="strong: namespaces or bubblewrap; limits: neither of them.")
    parallel: PositiveInt = Field(8, description="Programs that run at the same time, at most one on each core.")
    time_s: PositiveFloat = Field(2.0, description="Processor seconds of one case; three times this in wall time.")
    memory_mib: PositiveInt = Field(512, description="Memory of one case.")
    processes: PositiveInt = Field(32, description="Processes of one case.")
    tmp_mib: PositiveInt = Field(64, description="Size of /tmp, in memory. With `isolation: limits`, of each file.")

    @property
    def limits(self) -> Limits:
        return Limits(self.time_s, memory_mib=self.memory_mib, processes=self.processes, tmp_mib=self.tmp_mib)


def prepare(settings: CodeSettings, timeout_s: float, is_resume: bool) -> str:
    """Return a description of the isolation.

    Raises ConfigError if the isolation is weaker than configured, or if one endless loop may use up `timeout_s`.
    """
    if timeout_s <= (longest_s := settings.limits.wall_s):
        raise ConfigError(
            f"a program may take {longest_s:g} s by the clock (3 * time_s), and a completion has timeout_s = "
            f"{timeout_s:g}. Raise rewards.N.timeout_s: groups of endless loops are then scored, and not masked."
        )
    return describe(find_isolation(settings.isolation))


@reward("code", CodeSettings, prepare=prepare)
def code(group: Group, settings: CodeSettings) -> Iterator[float]:
    """Score 1.0 for a program that passes its tests; `program_of` finds the program.

    The column `tests_field` is Python text with assertions, run after the program. Or it is a list of `{"input": …,
    "output": …}`, possibly as JSON: the program reads stdin, and its output is compared without white space at ends of
    lines. With `partial`, the score of a list is the share of passed cases. No case runs after a case over a limit if
    one more could use up `timeout_s`. `with_prompt` puts the column `prompt_field` before the program: the head of a
    function, without the markup of a chat.

    A program has `time_s` of processor time for each case, and three times that in wall time. The sandbox has no
    network, no files except the system's, and /tmp in memory. `isolation: limits` is used only if the config names it.
    """
    limits = settings.limits
    tests = group.column_of(settings, "tests_field")
    cases, isolation = _cases(tests), find_isolation(settings.isolation)
    head = group.column_of(settings, "prompt_field", str) if settings.with_prompt else ""

    patience_s = max(0.0, _SHARE_OF_TIMEOUT * group.timeout_s - limits.wall_s) if settings.partial else None

    def score(completion: str) -> float:
        program = behind_head(head, program_of(completion, is_tested=cases is None))
        if cases is None:
            job = json.dumps({"program": program, "tests": tests})
            argv = [sys.executable, "-I", str(UNIT_TESTS), str(settings.time_s)]
            # The program's process has `time_s`. The rest of the clock time is for the tests and the messages.
            [result] = run_job(isolation, argv, {}, [job], replace(limits, cpu_s=limits.wall_s, clock=1.0))
            if result.verdict == "nothing":
                raise ConfigError(f"a text of tests asserts nothing, and calls none of its functions: {tests[:200]!r}.")
            return float(result.ended == "exit 0" and result.verdict == "passed")
        argv, inputs = [sys.executable, "-I", "solution.py"], [given for given, _ in cases]
        results = run_job(isolation, argv, {"solution.py": program}, inputs, limits, patience_s)
        passed = sum(
            result.ended == "exit 0" and _lines(result.stdout) == _lines(wanted)
            for result, (_, wanted) in zip(results, cases, strict=False)
        )
        return passed / len(cases) if settings.partial else float(passed == len(cases))

    with ThreadPoolExecutor(min(settings.parallel, len(os.sched_getaffinity(0)))) as threads:
        yield from threads.map(score, group.completions)


def program_of(completion: str, is_tested: bool = False) -> str:
    """Return the program in a completion: the last of its `answer_blocks` for Python.

    With `is_tested`, the last block that defines a function or class, if any: an example of its use may follow.

    >>> program_of("Like this:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    programs = answer_blocks(completion, _PYTHON)
    defining = [program for program in programs if is_tested and _DEFINITION.search(program)]
    return (defining or programs)[-1]


def behind_head(head: str, program: str) -> str:
    r"""Return a function's head with its body, or with a program that repeats the head.

    >>> behind_head("def one():\n", "    return 1\n"), behind_head("def one():\n", "def one(): return 1")
    ('def one():\n    return 1\n', 'def one():\n    pass\ndef one(): return 1')
    """
    last = (head.strip("\n").splitlines() or [""])[-1]
    if not head.endswith("\n") or program.lstrip("\n")[:1].isspace() or not last:
        return head + program
    margin = last[: len(last) - len(last.lstrip())] + "    " * last.rstrip().endswith(":")
    return f"{head}{margin}pass\n{program}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _cases(tests: Any) -> list[tuple[str, str]] | None:
    """Return inputs and outputs; None for Python text. Raises ConfigError for tests that every program passes."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)  # As Python, this text would assert nothing.
        except (ValueError, RecursionError):
            if tests.strip():
                return None
            raise ConfigError("a text of tests is empty; every program would pass it.") from None
    try:
        cases = [(case["input"], case["output"]) for case in tests]
        if not all(isinstance(value, str | int | float) for case in cases for value in case):
            raise TypeError
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"tests are a text of Python, or a list of {{input: …, output: …}} whose values are texts or numbers; got "
            f"{str(tests)[:200]!r}."
        ) from error
    if not cases:
        raise ConfigError("a list of tests is empty; every program would pass it.")
    return [(str(given), str(wanted)) for given, wanted in cases]
