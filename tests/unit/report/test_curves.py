from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from PIL import Image, ImageColor

from hpc_grpo.errors import ConfigError
from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.report.figure import PALETTE, Figure, Series, draw_image, draw_text
from hpc_grpo.report.page import print_report
from hpc_grpo.run.paths import RunDir


@pytest.fixture
def finished_run(run_dir: RunDir) -> RunDir:
    sink = JsonlSink(run_dir.metrics)
    for step in range(21):
        metrics = {"reward/mean": step / 25} if step else {}
        if step % 10 == 0:
            metrics["eval/pass@1"] = 0.3 + step / 40
        sink.write(StepRecord(step=step, total_steps=20, metrics=metrics))
    sink.close()
    return run_dir


def write_eval(path: Path, completions: list[tuple[int, str, bool | None]], sources: Sequence[str] = ()) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = (
        {
            "ordinal": n,
            "source": sources[n] if sources else "sums",
            "prompt": f"What is {n}+1?\n",
            "answer": f"{n}+1={n + 1} #### {n + 1}",
            "completion": text,
            "solved": solved,
        }
        for n, text, solved in completions
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_curve_and_picture(finished_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    picture = print_report(finished_run)
    shown = capsys.readouterr().out
    assert "reward/mean: 0.040 (step 1) -> 0.800 (step 20)" in shown
    assert "eval/pass@1: 0.300 (step 0) -> 0.800 (step 20)" in shown
    assert shown.count("●") == 4  # three evals and the legend
    assert sum("⠀" < character <= "⣿" for character in shown) > 20
    assert picture == finished_run.path / "report.png"
    with Image.open(picture) as image:
        assert image.size == (960, 540)
        # A blank canvas has one colour; two curves, a grid and text have many.
        assert len(image.convert("RGB").getcolors(maxcolors=1 << 20)) > 50


def test_sources_and_intervals_of_an_eval_are_reported(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonlSink(run_dir.metrics)
    for step, solved in ((0, 0.25), (9, 0.5)):
        values = {"": solved, "_low": solved - 0.1, "_high": solved + 0.1}
        of_sets = {f"eval/{of_set}pass@1{end}": value for of_set in ("", "hard/") for end, value in values.items()}
        of_source = {f"eval/pass@1{end}/gcd": value / 2 for end, value in values.items()}
        metrics = {**of_sets, **of_source, "eval/pass@1/sums": 1.0, "eval/reward_mean": 0.7}
        sink.write(StepRecord(step=step, total_steps=9, metrics=metrics))
    sink.close()
    print_report(run_dir)
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("eval/")] == [
        "eval/pass@1: 0.250 (step 0) -> 0.500 [0.400, 0.600] (step 9)",
        "eval/hard/pass@1: 0.250 (step 0) -> 0.500 [0.400, 0.600] (step 9)",
        "eval/pass@1/gcd: 0.125 (step 0) -> 0.250 [0.200, 0.300] (step 9)",
        "eval/pass@1/sums: 1.000 (step 0) -> 1.000 (step 9)",
    ]
    assert sum(mark in line for line in shown for mark in "●■") > sum("▲" in line for line in shown) == 0


def test_before_and_after_shows_newly_solved_prompts_first(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_eval(finished_run.eval_rollouts(0), [(0, "#### 1", True), (7, "#### 9", False), (7, "second", True)])
    write_eval(finished_run.eval_rollouts(10), [(7, "in between", False)])
    write_eval(finished_run.eval_rollouts(20), [(0, "#### 1", True), (7, "7+1=8\n#### 8", True)])
    print_report(finished_run)
    shown = capsys.readouterr().out
    assert "What is 7+1?   (answer: 8)\n  step    0 wrong #### 9\n  step   20 right 7+1=8 #### 8\n" in shown
    assert shown.index("What is 7+1?") < shown.index("What is 0+1?")
    assert "in between" not in shown
    assert "second" not in shown


def test_of_a_chat_only_what_the_user_said_last_is_shown(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (0, 20):
        path = finished_run.eval_rollouts(step)
        write_eval(path, [(7, "8", True)])
        chat = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>user\nWhat is 7+1?<|im_end|>\n<|im_start|>assistant\n"
        line = json.loads(path.read_text()) | {"prompt": chat}
        path.write_text(json.dumps(line) + "\n")
    print_report(finished_run)
    assert "\nWhat is 7+1?   (answer: 8)\n" in capsys.readouterr().out


def test_prompts_in_their_order_are_the_first_of_each_source_whatever_became_of_them(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [(0, "right", True), (1, "right", True), (2, "wrong", False), (3, "wrong", False)]
    for step in (0, 20):
        write_eval(finished_run.eval_rollouts(step), answers, sources=["a", "a", "b", "b"])
    print_report(finished_run, in_their_order=3)
    shown = capsys.readouterr().out
    assert re.findall(r"What is (\d)\+1", shown) == ["0", "2", "1"]


def test_what_could_not_be_graded_is_not_shown_as_wrong(
    finished_run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_eval(finished_run.eval_rollouts(0), [(0, "#### 1", True), (7, "#### 8", None)])
    write_eval(finished_run.eval_rollouts(20), [(0, "#### 1", True), (7, "#### 8", True)])
    print_report(finished_run)
    shown = capsys.readouterr().out
    assert "What is 0+1?" in shown
    assert "What is 7+1?" not in shown


def test_a_run_without_metrics_is_a_config_error(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match="has the run finished a step"):
        print_report(run_dir)


def test_sft_run_shows_its_loss(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    sink = JsonlSink(run_dir.metrics)
    for step in (1, 2):
        sink.write(StepRecord(step=step, total_steps=2, metrics={"loss/policy": 3.0 / step}))
    sink.close()
    print_report(run_dir)
    assert "loss/policy: 3.000 (step 1) -> 1.500 (step 2)" in capsys.readouterr().out


def test_a_rising_curve_goes_from_the_lower_left_to_the_upper_right_without_colours() -> None:
    text = draw_text(Figure("run", [Series("reward/mean", (0, 10), (0.0, 1.0))]))
    assert "\x1b" not in text
    rows = [line for line in text.splitlines() if "│" in line]
    ends = [(min(dots), max(dots)) for row in rows if (dots := [n for n, char in enumerate(row) if "⠀" < char <= "⣿"])]
    assert ends == sorted(ends, reverse=True)
    assert len(ends) == len(rows)
    assert text.splitlines()[-1].strip() == "⠤ reward/mean"


def test_one_point_and_a_constant_can_be_drawn() -> None:
    point = Series("eval/pass@1", (0,), (0.5,), marked=True)
    assert draw_text(Figure("run", [point])).count("●") == 2  # the point and the legend
    constant = draw_text(Figure("run", [Series("reward/mean", (1, 2, 3), (0.5, 0.5, 0.5))]))
    assert sum("⠀" < char <= "⣿" for char in constant) > 50


def test_of_a_long_curve_the_means_of_neighbours_are_drawn() -> None:
    flat = draw_text(Figure("run", [Series("reward/mean", tuple(range(8000)), (0.0, 1.0) * 4000)]))
    assert sum(any("⠀" < char <= "⣿" for char in line) for line in flat.splitlines() if "│" in line) == 1


def test_the_picture_has_the_colours_that_all_can_tell_apart() -> None:
    curves = [Series(name, (1, 2), (float(n), float(n))) for n, name in enumerate(("reward/mean", "eval/pass@1"))]
    with Image.open(io.BytesIO(draw_image(Figure("run", curves), "png"))) as picture:
        drawn = {color for _, color in picture.convert("RGB").getcolors(maxcolors=1 << 20)}
    assert {ImageColor.getrgb(color) for color in PALETTE[:2]} <= drawn
