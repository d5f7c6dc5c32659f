"""What `report` prints of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.report.terminal import Series, draw_text, print_report
from hpc_grpo.run.paths import RunDir


def write_metrics(run: RunDir, lines: dict[int, dict[str, float]]) -> None:
    sink = JsonlSink(run.metrics)
    for step, metrics in lines.items():
        sink.write(StepRecord(step=step, total_steps=20, metrics=metrics))
    sink.close()


@pytest.fixture
def finished_run(run_dir: RunDir) -> RunDir:
    rewards = {step: {"reward/mean": step / 25} if step else {} for step in range(21)}
    evals = {step: {"eval/pass@1": 0.3 + step / 40} for step in (0, 10, 20)}
    write_metrics(run_dir, {step: own | evals.get(step, {}) for step, own in rewards.items()})
    return run_dir


def write_eval(
    path: Path, completions: list[tuple[int, str, bool | None]], sources: Sequence[str] = ("sums",) * 8, **changes: Any
) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = (
        {
            "ordinal": n,
            "source": sources[n],
            "prompt": f"What is {n}+1?\n",
            "answer": f"{n}+1={n + 1} #### {n + 1}",
            "completion": text,
            "solved": solved,
            **changes,
        }
        for n, text, solved in completions
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_curve_and_its_ends_are_printed(finished_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    print_report(finished_run)
    shown = capsys.readouterr().out
    assert "reward/mean: 0.040 (step 1) -> 0.800 (step 20)" in shown
    assert "eval/pass@1: 0.300 (step 0) -> 0.800 (step 20)" in shown
    assert shown.count("●") == 4  # three evals and the legend
    assert sum("⠀" < character <= "⣿" for character in shown) > 20


def test_sources_and_intervals_of_an_eval_are_reported(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for step, solved in ((0, 0.25), (9, 0.5)):
        values = {"": solved, "_low": solved - 0.1, "_high": solved + 0.1}
        of_sets = {f"eval/{of_set}pass@1{end}": value for of_set in ("", "hard/") for end, value in values.items()}
        of_source = {f"eval/pass@1{end}/gcd": value / 2 for end, value in values.items()}
        lines[step] = {**of_sets, **of_source, "eval/pass@1/sums": 1.0, "eval/reward_mean": 0.7}
    write_metrics(run_dir, lines)
    print_report(run_dir)
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("eval/")] == [
        "eval/pass@1: 0.250 (step 0) -> 0.500 [0.400, 0.600] (step 9)",
        "eval/hard/pass@1: 0.250 (step 0) -> 0.500 [0.400, 0.600] (step 9)",
        "eval/pass@1/gcd: 0.125 (step 0) -> 0.250 [0.200, 0.300] (step 9)",
        "eval/pass@1/sums: 1.000 (step 0) -> 1.000 (step 9)",
    ]
    assert sum(mark in line for line in shown for mark in "●■") > sum("▲" in line for line in shown) == 0


def test_the_evals_reward_is_reported_while_nothing_is_solved(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_metrics(run_dir, {step: {"eval/pass@1": 0.0, "eval/reward_mean": 0.1 * step} for step in (0, 3)})
    print_report(run_dir)
    assert "eval/reward_mean: 0.000 (step 0) -> 0.300 (step 3)" in capsys.readouterr().out


def test_before_and_after_shows_newly_solved_prompts_first_and_none_that_could_not_be_graded(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_eval(
        finished_run.eval_rollouts(0), [(0, "#### 1", True), (7, "#### 9", False), (7, "second", True), (5, "6", None)]
    )
    write_eval(finished_run.eval_rollouts(10), [(7, "in between", False)])
    write_eval(finished_run.eval_rollouts(20), [(0, "#### 1", True), (7, "7+1=8\n#### 8", True), (5, "6", True)])
    print_report(finished_run)
    shown = capsys.readouterr().out
    assert "What is 7+1?   (answer: 8)\n  step    0 wrong #### 9\n  step   20 right 7+1=8 #### 8\n" in shown
    assert shown.index("What is 7+1?") < shown.index("What is 0+1?")
    assert not re.search(r"in between|second|What is 5\+1", shown)


def test_of_a_chat_only_what_the_user_said_last_is_shown(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>user\nWhat is 7+1?<|im_end|>\n<|im_start|>assistant\n"
    for step in (0, 20):
        write_eval(finished_run.eval_rollouts(step), [(7, "8", True)], prompt=chat)
    print_report(finished_run)
    assert "\nWhat is 7+1?   (answer: 8)\n" in capsys.readouterr().out


def test_prompts_in_their_order_are_the_first_of_each_source_whatever_became_of_them(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [(0, "right", True), (1, "right", True), (2, "wrong", False), (3, "wrong", False)]
    for step in (0, 20):
        write_eval(finished_run.eval_rollouts(step), answers, sources=["a", "a", "b", "b"])
    print_report(finished_run, in_their_order=3)
    assert re.findall(r"What is (\d)\+1", capsys.readouterr().out) == ["0", "2", "1"]


def test_a_run_without_metrics_says_so_and_one_of_sft_shows_its_loss(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    print_report(run_dir)
    assert f"no step has ended yet. hpc-grpo status --why {run_dir.path} says why." in capsys.readouterr().out
    write_metrics(run_dir, {step: {"loss/policy": 3.0 / step} for step in (1, 2)})
    print_report(run_dir)
    assert "loss/policy: 3.000 (step 1) -> 1.500 (step 2)" in capsys.readouterr().out


def drawn(*values: float, name: str = "reward/mean") -> str:
    return draw_text([Series(name, dict(enumerate(values)))])


def test_a_rising_curve_goes_from_the_lower_left_to_the_upper_right_without_colours() -> None:
    text = drawn(0.0, 1.0)
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if "│" in line]
    ends = [(min(dots), max(dots)) for row in rows if (dots := [n for n, char in enumerate(row) if "⠀" < char <= "⣿"])]
    assert ends == sorted(ends, reverse=True)
    assert len(ends) == len(rows)
    assert text.splitlines()[-1].strip() == "⠤ reward/mean"


def test_one_point_a_constant_and_the_means_of_a_long_curve_can_be_drawn() -> None:
    assert drawn(0.5, name="eval/pass@1").count("●") == 2  # the point and the legend
    assert sum("⠀" < char <= "⣿" for char in drawn(0.5, 0.5, 0.5)) > 50
    flat = drawn(*(0.0, 1.0) * 4000)
    assert sum(any("⠀" < char <= "⣿" for char in line) for line in flat.splitlines() if "│" in line) == 1


def test_without_plotext_the_ends_are_printed(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    print_report(finished_run)
    shown = capsys.readouterr().out
    assert "reward/mean: 0.040 (step 1) -> 0.800 (step 20)" in shown
    assert "⠀" not in shown
