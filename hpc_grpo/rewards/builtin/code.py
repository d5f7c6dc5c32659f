"""Built-in reward: runs the completion's program on unit tests, or on inputs with expected outputs, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import reward
from hpc_grpo.rewards.sandbox.isolation import CaseResult, Limits, describe, find_isolation, run_job

_FENCED = re.compile(r"```(?:[Pp]ython3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)

_TESTER = """
import json, os, sys, types

def main():
    job = json.load(sys.stdin)
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(job["program"], "solution.py", "exec"), module.__dict__)
    exec(compile(job["tests"], "tests.py", "exec"), module.__dict__)
    os.write(int(os.environ["VERDICT_FD"]), job["token"].encode())

main()
"""
"""Runs program and tests in one namespace; only the end of the tests brings the token out, not an exit code of 0."""


def prepare(isolation: str = "strong", timeout_s: float = 10.0, **args: Any) -> str:
    """Say what isolation there is. Raises ConfigError where it is weaker than wanted, or one endless loop takes all."""
    if timeout_s <= (longest_s := _limits(args).wall_s):
        raise ConfigError(
            f"code: a program may take {longest_s:g} s by the clock (3 * time_s), and the call of a group ends after "
            f"timeout_s = {timeout_s:g}. Raise rewards.N.timeout_s: endless loops are then scored, and not masked."
        )
    return describe(find_isolation(isolation))


@reward("code", prepare=prepare)
def code(
    prompts: Sequence[str],
    completions: Sequence[str],
    tests_field: str = "tests",
    with_prompt: bool = False,
    partial: bool = False,
    isolation: str = "strong",
    parallel: int = 8,
    time_s: float = 2.0,
    memory_mib: int = 512,
    processes: int = 32,
    tmp_mib: int = 64,
    **fields: Any,
) -> list[float]:
    """Score 1.0 for a program that passes its tests: the last Python block in code fences, else the whole completion.

    The column `tests_field` is a text of Python with assertions, run behind the program, or a list of
    `{"input": …, "output": …}`, also as JSON: the program then reads stdin, and what it prints is compared without
    white space at ends of lines. With `partial` the score of such a list is the share that passed. `with_prompt` puts
    the prompt in front of the program, where that is the head of a function.

    A program has `time_s` of processor time for each case, and three times that by the clock. The sandbox has no
    network, no files but the system's, and /tmp in memory; `isolation: limits` is asked for by name alone.
    """
    if tests_field not in fields:
        raise ConfigError(
            f"code needs tests: set rewards.N.args.tests_field to a column. There is no column {tests_field!r}; "
            f"columns: {', '.join(sorted(fields)) or 'none'}."
        )
    limits = Limits(time_s, memory_mib, processes, tmp_mib)
    found = find_isolation(isolation)

    def score(prompt: str, completion: str, tests: Any) -> float:
        program = (prompt if with_prompt else "") + program_of(completion)
        if (cases := _cases(tests)) is None:
            return float(passes_tests(found, program, tests, limits))
        passed = count_passed(found, program, cases, limits, stop_early=not partial)
        return passed / len(cases) if partial else float(passed == len(cases))

    with ThreadPoolExecutor(parallel) as threads:
        return list(threads.map(score, prompts, completions, fields[tests_field]))


def program_of(completion: str) -> str:
    """Return the program in a completion.

    >>> program_of("Like this:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = _FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


def passes_tests(isolation: str, program: str, tests: str, limits: Limits) -> bool:
    """Tell whether a program's tests ran to their end."""
    token = secrets.token_hex(16)
    job = json.dumps({"program": program, "tests": tests, "token": token})
    [result] = run_job(isolation, [sys.executable, "-I", "-c", _TESTER], {}, [job], limits)
    return result.ended == "exit 0" and result.verdict == token


def count_passed(
    isolation: str, program: str, cases: Sequence[tuple[str, str]], limits: Limits, stop_early: bool
) -> int:
    """Count the cases whose output is right."""
    argv = [sys.executable, "-I", "solution.py"]
    results = run_job(isolation, argv, {"solution.py": program}, [given for given, _ in cases], limits, stop_early)
    return sum(_is_right(result, wanted) for result, (_, wanted) in zip(results, cases, strict=False))


def _is_right(result: CaseResult, wanted: str) -> bool:
    return result.ended == "exit 0" and _lines(result.stdout) == _lines(wanted)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _cases(tests: Any) -> list[tuple[str, str]] | None:
    """Return inputs and outputs; None for a text of Python. Raises ConfigError for tests that every program passes."""
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)  # as Python it would assert nothing
        except (ValueError, RecursionError):
            if tests.strip():
                return None
            raise ConfigError("code: a text of tests is empty; every program would pass it.") from None
    try:
        cases = [(str(case["input"]), str(case["output"])) for case in tests]
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"code: tests are a text of Python, or a list of {{input: …, output: …}}; got {str(tests)[:200]!r}."
        ) from error
    if not cases:
        raise ConfigError("code: a list of tests is empty; every program would pass it.")
    return cases


def _limits(args: Any) -> Limits:
    limits = Limits(
        args.get("time_s", 2.0), args.get("memory_mib", 512), args.get("processes", 32), args.get("tmp_mib", 64)
    )
    if min(limits.cpu_s, limits.memory_mib, limits.processes, limits.tmp_mib) <= 0 or args.get("parallel", 8) < 1:
        raise ConfigError("code: time_s, memory_mib, processes, tmp_mib and parallel must be more than 0.")
    return limits
