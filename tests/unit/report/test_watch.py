from __future__ import annotations

import io
import json
import time
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.report.watch import snapshot, view, watch_live, watch_plainly
from hpc_grpo.run.paths import RunDir
from tests.support.command import call
from tests.support.run_builder import RunBuilder


def write_steps(run: RunDir, *steps: int, **metrics: float) -> None:
    sink = JsonlSink(run.metrics)
    for step in steps:
        values = {"reward/mean": step / 10, "throughput/tokens_per_s": 2800.0, "time/step_s": 3.42, **metrics}
        sink.write(StepRecord(step=step, total_steps=95, metrics=values))
    sink.close()


def write_rollouts(run: RunDir, *lines: dict[str, object]) -> None:
    run.rollouts(20).parent.mkdir()
    run.rollouts(20).write_text("".join(json.dumps(line) + "\n" for line in lines))


def trains(built: RunBuilder, **state: object) -> None:
    built.attempt(1)
    built.hold(1)
    built.state(1, **state)


def complete(built: RunBuilder) -> None:
    built.attempt(1, "complete")
    built.run.holder.unlink()
    built.run.complete_marker.touch()


def test_the_last_steps_are_lines_of_text(built: RunBuilder) -> None:
    assert snapshot(built.run).steps == []
    write_steps(built.run, *range(1, 21))
    with built.run.metrics.open("a") as file:
        file.write('{"step": 21, "torn')
    shown = snapshot(built.run).steps
    assert len(shown) == 8
    assert shown[-1] == "step 20  reward 2.000  tokens/s 2.8k  took 3.4 s"


def test_a_pipe_gets_every_step_and_every_new_headline_once(built: RunBuilder) -> None:
    trains(built)
    write_steps(built.run, 1)
    turns: list[Callable[[], None]] = [lambda: write_steps(built.run, 2, 3), lambda: None, lambda: complete(built)]
    lines = list(watch_plainly(built.run, sleep=lambda _seconds: turns.pop(0)()))
    assert [line.split("  ")[0] for line in lines] == [
        "step 1",
        "adder: training, attempt 1",
        "step 2",
        "step 3",
        "adder: complete, attempt 1",
    ]


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        ({"sampled": 3, "graded": 2}, "step 41, rollouts: 3 of 4 groups sampled, 2 graded"),
        ({"sampled": 4, "graded": 4}, "step 41, rollouts: all groups graded (4)"),
    ],
)
def test_the_step_under_way_is_shown(built: RunBuilder, groups: dict[str, int], shown: str) -> None:
    trains(built, waits_for="rollouts", num_groups=4, **groups)
    assert shown in snapshot(built.run).summary.card()


def test_on_a_terminal_it_draws_until_the_run_is_over(built: RunBuilder) -> None:
    trains(built)
    write_steps(built.run, 1)
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=True, width=120, height=40)
    watch_live(built.run, console, sleep=lambda _seconds: complete(built))
    assert "adder: training" in drawn.getvalue()
    assert "adder: complete" in drawn.getvalue()
    assert "step 1  reward 0.100" in drawn.getvalue()


def test_the_command_ends_with_a_run_that_is_over(built: RunBuilder) -> None:
    built.attempt(1, "crash")
    result = call("watch", "adder")
    assert result.exit_code == 0
    assert result.output == "adder: failed, attempt 1: why 1\n"


def test_the_view_shows_progress_length_rollouts_and_alerts_and_obeys_no_completion(built: RunBuilder) -> None:
    built.attempt(1, ends_at=time.time() + 400)
    built.hold(1, beat_age_s=45.0)
    built.state(1, step=20, heartbeat=time.time() - 45.0)
    write_steps(built.run, 20, **{"tokens/truncated_fraction": 0.75})
    write_rollouts(built.run, {"completion": "It is [bold]2[/].\x1b[2J\nYes.", "reward": 0.25})
    console = Console(record=True, file=io.StringIO(), width=140, height=40)
    console.print(view(snapshot(built.run), console.height))
    shown = console.export_text()
    assert "20/95" in shown
    assert "does not end within this job: 1 h 00 min" in shown or "does not end within this job: 59 min" in shown
    assert "0.250  It is [bold]2[/].\\x1b[2J Yes." in shown
    assert "! no sign of life for " in shown
    assert "! no further job waits" in shown
    assert "! half of the completions or more are cut off" in shown
    low = _lines_of(view(snapshot(built.run), shown.count("\n") - 1), width=140)
    assert "last rollouts" not in low
    assert "last steps" in low


def test_a_run_of_episodes_shows_their_turns_and_names_what_cuts_them(built: RunBuilder) -> None:
    trains(built, step=20)
    write_steps(built.run, 20, **{"tokens/truncated_fraction": 0.75, "episode/turns": 2.0})
    turns = [{"observation": "", "text": "5", "reward": 0.0}, {"observation": "No.", "text": "7", "reward": 1.0}]
    write_rollouts(built.run, {"completion": "5 No. 7", "reward": 1.0, "turns": turns})
    shown = snapshot(built.run)
    assert shown.rollouts == ["1.000  [turn 1, reward 0] 5 [environment] No. [turn 2, reward 1] 7"]
    assert "environment.max_turns, environment.max_tokens, rollout.max_new_tokens" in " ".join(shown.alerts)


@pytest.mark.parametrize(("reward", "shown"), [(10**400, "inf"), ("much", "-"), (1, "1.000")])
def test_a_reward_that_is_no_usual_number_is_shown(built: RunBuilder, reward: object, shown: str) -> None:
    built.state(1, step=20)
    write_rollouts(built.run, {"completion": "Yes.", "reward": reward})
    assert snapshot(built.run).rollouts == [f"{shown}  Yes."]


def test_the_view_is_never_higher_than_the_terminal(built: RunBuilder) -> None:
    built.attempt(1, ends_at=time.time() + 400)
    built.state(1, step=20)
    metrics = {"tokens/truncated_fraction": 0.9, "reward/invalid_fraction": 0.9, "reward/zero_variance_fraction": 1.0}
    write_steps(built.run, *range(1, 21), **metrics)
    write_rollouts(built.run, *[{"completion": "x" * 500, "reward": 0.5}] * 9)
    for width, height in ((140, 40), (80, 26), (50, 26), (80, 24), (40, 8)):
        shown = _lines_of(view(snapshot(built.run), height), width)
        assert shown.count("\n") <= height, (width, height)


def test_ctrl_c_leaves_the_last_view_behind(built: RunBuilder) -> None:
    write_steps(built.run, 1)

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    built.attempt(1)
    built.hold(1)
    drawn = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        watch_live(built.run, Console(file=drawn, force_terminal=True, width=120, height=40), sleep=interrupted)
    assert "step 1  reward 0.100" in drawn.getvalue().rpartition("\x1b[?1049l")[2]


def _lines_of(shown: RenderableType, width: int) -> str:
    console = Console(record=True, file=io.StringIO(), width=width)
    console.print(shown)
    return console.export_text()


def test_a_node_that_holds_up_the_others_is_an_alert_while_the_run_trains(built: RunBuilder) -> None:
    said = "node n2 takes 1.42 times as long as the others do"
    trains(built, slow_node=said)
    assert snapshot(built.run).alerts[-1] == said
    complete(built)
    assert said not in snapshot(built.run).alerts
