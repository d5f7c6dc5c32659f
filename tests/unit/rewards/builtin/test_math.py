"""`math` on pairs of a given answer and a reference. Each line of a table is one pair, with a tilde between."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.registry import REWARDS
from hpc_grpo.rewards import score

EQUAL = r"""
\sqrt{8} ~ 2\sqrt{2}
2\sqrt2 ~ \sqrt{8}
\frac{\sqrt{2}}{2} ~ \frac{1}{\sqrt{2}}
\sqrt{50} ~ 5\sqrt{2}
\sqrt[3]{16} ~ 2\sqrt[3]{2}
\{1,2,3\} ~ \{3,2,1\}
\{1, 2, 2\} ~ \{1,2\}
1, 2, 3 ~ 1,2,3
x=1, x=2 ~ \{1,2\}
[0,1) ~ [0,1)
(-\infty, 2] ~ (-\infty,2]
(-\infty,0)\cup(1,\infty) ~ (1,\infty)\cup(-\infty,0)
[0.5, 1] ~ [\frac12, 1]
x \in [1, 2] ~ [1,2]
5\text{ cm} ~ 5
5 ~ 5\text{ cm}
5 \mathrm{~km} ~ 5
90^\circ ~ 90
90 ~ 90^{\circ}
\$18.90 ~ 18.9
12\text{ apples} ~ 12
50\% ~ 50
50 ~ 50\%
0.5 ~ 50\%
\frac{1}{2} ~ 50\%
3 ~ 3.0
3.0 ~ 3
3.00 ~ 3
\begin{pmatrix}1&2\\3&4\end{pmatrix} ~ \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{bmatrix}1&2\\3&4\end{bmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}\frac12\\ \sqrt{8}\end{pmatrix} ~ \begin{pmatrix}0.5\\2\sqrt{2}\end{pmatrix}
\frac{1}{2} ~ 0.5
1/2 ~ \frac{2}{4}
\frac12 ~ \frac{1}{2}
\dfrac{3}{4} ~ \tfrac34
-\frac{3}{4} ~ \frac{-3}{4}
1\frac{1}{2} ~ \frac{3}{2}
1,000 ~ 1000
1{,}000{,}000 ~ 1000000
1 000 ~ 1000
10^3 ~ 1000
1.5\times10^{3} ~ 1500
1.5e3 ~ 1500
2^{10} ~ 1024
x^2+2x+1 ~ (x+1)^2
(x+1)(x-1) ~ x^2-1
y = 2x + 3 ~ 2x+3
y=2x+3 ~ y = 3 + 2x
x = 5 ~ 5
5 ~ x=5
\frac{x}{2} ~ 0.5x
\sin^2 x + \cos^2 x ~ 1
2\pi ~ \pi\cdot 2
e^{\ln 2} ~ 2
\log_2 8 ~ 3
\binom{5}{2} ~ 10
5! ~ 120
3+4i ~ 4i+3
(1,2) ~ (1,2)
(1, \frac{1}{2}) ~ (1, 0.5)
x > 3 ~ x>3
3 < x ~ x>3
\text{Paris} ~ paris
B ~ \text{B}
\text{(B)} ~ B
+7 ~ 7
\infty ~ \infty
0.1+0.2 ~ 0.3
101_2 ~ 101_2
2\frac{1}{2} ~ 5/2
2 1/2 ~ 2.5
-2 1/2 ~ -\frac{5}{2}
X ~ X
1 2 3 ~ 1  2 3
1.0 2 3.50 ~ 1 2 3.5
true ~ \text{True}
x = 5 ~ **$5$**
\emptyset ~ \varnothing
\varnothing ~ \emptyset
\varnothing ~ \{\}
9:00 a.m. ~ 9:00 AM
9 am ~ 09:00\text{ a.m.}
x \neq 5 ~ \neq 5
\ge 5 ~ x \geq 5
"""

DIFFERENT = r"""
\sqrt{3} ~ 3
2\sqrt{3} ~ 2\sqrt{2}
1.414 ~ \sqrt{2}
\{1,2\} ~ \{1,2,3\}
\{1,2,3\} ~ \{1,2\}
\emptyset ~ \{0\}
[0,1] ~ [0,1)
(0,1) ~ [0,1]
(-\infty, 2) ~ (-\infty,2]
(-\infty,0)\cup(1,\infty) ~ (-\infty,0)\cup[1,\infty)
6\text{ cm} ~ 5\text{ cm}
5\% ~ 50\%
3.1 ~ 3
3 ~ 3.1
\begin{pmatrix}1&2\\3&5\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1&3\\2&4\end{pmatrix} ~ \begin{pmatrix}1&2\\3&4\end{pmatrix}
\begin{pmatrix}1\\2\\3\end{pmatrix} ~ \begin{pmatrix}1&2&3\end{pmatrix}
\frac{1}{3} ~ 0.333
0.333333 ~ \frac13
\frac{3}{2} ~ \frac{2}{3}
1,2 ~ 12
x^2+1 ~ x^2-1
2x ~ x
x=4 ~ 5
\sin x ~ \cos x
\pi ~ 3.14159
\frac{\pi}{6} ~ 30^\circ
3-4i ~ 3+4i
|x| ~ x
(2,1) ~ (1,2)
x \ge 3 ~ x>3
\text{even} ~ odd
21/2 ~ 2 1/2
123 ~ 1 2 3
1 2 3 ~ 123
3 2 1 ~ 1 2 3
X ~ x
x^2 ~ 2
2a ~ 2
-[0,1) ~ 1
5! ~ 5
A ~ B
-5 ~ 5
-\infty ~ \infty
5 \text{ or } 6 ~ 6
9:00 a.m. ~ 9:00 p.m.
9:30 a.m. ~ 9:45 a.m.
12 pm ~ 2 pm
\neq 5 ~ 5
\geq 5 ~ 5
\geqslant 5 ~ 5
\lt 5 ~ 5
5 ~ \leq 5
\varnothing ~ \{\varnothing\}
\pm 2 ~ 2
 ~ 42
42e9999 ~ 42
(1+x)^{100000} ~ x
\frac{1}{1-\frac{1}{1-\frac{1}{1-x}}} ~ 1-\frac{1}{x}
"""

NEVER_ENDING = r"""
9^{9^{9^{9}}} ~ 1
2^{2^{2^{2^{2^{2}}}}} - 1 ~ 7
\int_0^1 e^{-x^2\sin(x^3)}\,dx ~ 1
\sum_{n=1}^{100000000} \frac{1}{n^2} ~ 1
100000000! ~ 1
"""


def pairs(table: str) -> list[tuple[str, str]]:
    return [(given, answer) for given, _, answer in (line.partition(" ~ ") for line in table.strip().splitlines())]


def scores(table: str, cpu_s: float) -> dict[str, float]:
    return {
        f"{given} ~ {answer}": score(
            "math", [rf"So the answer is $\boxed{{{given}}}$."], {"answer": answer}, args={"completion_s": cpu_s}
        )[0]
        for given, answer in pairs(table)
    }


def test_equal_answers_in_other_notation_are_correct() -> None:
    assert {pair: value for pair, value in scores(EQUAL, 10.0).items() if value != 1.0} == {}


def test_answers_that_only_look_alike_are_wrong() -> None:
    assert {pair: value for pair, value in scores(DIFFERENT, 10.0).items() if value != 0.0} == {}


def test_an_answer_that_cannot_be_compared_costs_its_deadline_and_no_other() -> None:
    """The good pair comes last: it is judged by the child that was forked after the last stuck one."""
    begun = time.process_time()
    found = scores(NEVER_ENDING + r"\sqrt{8} ~ 2\sqrt{2}" + "\n", 0.5)
    assert found.pop(r"\sqrt{8} ~ 2\sqrt{2}") == 1.0
    assert set(found.values()) == {0.0}
    assert time.process_time() - begun < 5.0  # of this process: the time went to children, which were killed


def test_completions_of_a_group_that_agree_are_compared_once() -> None:
    stuck = r"\boxed{100000000!}"
    begun = time.monotonic()
    assert score("math", [stuck] * 50, {"answer": "x"}, args={"completion_s": 0.5}) == [0.0] * 50
    assert time.monotonic() - begun < 50 * 0.5


def test_an_answer_in_notation_is_found_in_the_last_line_without_a_box() -> None:
    completions = ["First.\nThe answer is $\\sqrt{8}$.", "The answer is $\\sqrt{7}$.", "\n"]
    assert score("math", completions, {"answer": r"2\sqrt{2}"}) == [1.0, 0.0, 0.0]


def test_notation_is_compared_in_a_worker_that_holds_much_address_space() -> None:
    """A reward beside math may import torch, and with it CUDA's libraries."""
    program = (
        "import mmap; from hpc_grpo.rewards import score; no_reserve = 0x4000;"
        "held = mmap.mmap(-1, 5 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve);"
        r"print(score('math', [r'\boxed{2\sqrt2}'], {'answer': r'\sqrt{8}'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[1.0]\n"


def test_an_empty_answer_equals_nothing() -> None:
    assert score("math", ["", r"\boxed{}"], {"answer": ""}) == [0.0, 0.0]


def test_correctness_is_math_under_its_older_name() -> None:
    assert score("correctness", ["1", "2", r"\boxed{1}"], {"answer": "#### 1"}) == [1.0, 0.0, 1.0]
    assert REWARDS.find("correctness").function is REWARDS.find("math").function


@pytest.mark.parametrize(
    "template",
    [
        *("{}", "${}$", "$$x = {}$$", r"\[{}\]", r"\text{{{}}}", r"\mathrm{{{}}}", r"\operatorname{{{}}}(1)", "1 + {}"),
        *(r"\frac{{{}}}{{2}}", "x = {}, y = 2", r"\{{{}, 1\}}", "({}, 1)", r"x_{{{}}}", "2*{}", "1 = 1 and {}", "{}%"),
        *(r"\begin{{pmatrix}} {} \end{{pmatrix}}", r"\sqrt{{{}}}", "f({})", r"\lim_{{x \to {}}} x", "1 2 {}", "-({})"),
    ],
)
def test_no_answer_reaches_python_through_the_parsers(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sympy's parser calls `eval`. math-verify hands it digits and operators alone, and reads LaTeX by a grammar."""
    from hpc_grpo.rewards import symbolic

    evaluated: list[str] = []
    python_eval = eval

    def recorded(source: Any, *names: Any) -> Any:
        evaluated.append(source if isinstance(source, str) else " ".join(source.co_names))
        return python_eval(source, *names)

    monkeypatch.setattr("builtins.eval", recorded)
    written = str(tmp_path / "written")
    for attack in (f"open('{written}','w')", f"__import__('os').system('touch {written}')", "().__class__.__base__"):
        symbolic.are_equal(template.format(attack), "1")
    symbolic.are_equal("3+4*(2)", "11")
    assert not Path(written).exists()
    assert all(name not in source for source in evaluated for name in ("open", "import", "class", "system"))
