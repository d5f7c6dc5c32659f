from __future__ import annotations

import asyncio
import errno
import html
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable

import pytest
from textual.pilot import Pilot

from hpc_grpo.metrics.record import StepRecord
from hpc_grpo.metrics.sinks import JsonlSink
from hpc_grpo.report import screen
from hpc_grpo.report.screen import WatchApp
from hpc_grpo.report.watch import Snapshot, snapshot, step_line, watch_plainly
from hpc_grpo.run.paths import RunDir
from tests.support.command import call
from tests.support.run_builder import RunBuilder

_SMALL = (80, 24)
_DEADLINE_S = 30.0
_CELL = 12.2  # the width of a character in Textual's pictures


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


def seen(app: WatchApp) -> str:
    """Return what stands on the screen, a line each."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for x, y, text in re.findall(r'<text [^>]*?x="([0-9.]+)" y="([0-9.]+)"[^>]*>(.*?)</text>', app.export_screenshot()):
        rows.setdefault(float(y), []).append((float(x), html.unescape(text).replace("\xa0", " ")))
    lines = []
    for _, parts in sorted(rows.items()):
        line = ""
        for x, text in sorted(parts):
            line = line.ljust(round(x / _CELL)) + text
        lines.append(line)
    return "\n".join(lines)


def seconds_of(shown: str) -> int:
    found = re.search(r"now: train (?:(\d+) min )?(\d+) s", shown)
    assert found, shown
    return 60 * int(found[1] or 0) + int(found[2])


async def until(pilot: Pilot[None], *texts: str) -> str:
    """Wait until all `texts` stand on the screen, and return the screen."""
    assert isinstance(pilot.app, WatchApp)
    deadline = time.monotonic() + _DEADLINE_S
    while missing := [text for text in texts if text not in (shown := seen(pilot.app))]:
        assert time.monotonic() < deadline, f"{missing} are not on the screen:\n{shown}"
        await pilot.pause(0.05)
    return shown


def on_screen(
    look: Callable[[Pilot[None]], Awaitable[None]],
    *runs: RunDir,
    chosen: RunDir | None = None,
    size: tuple[int, int] = _SMALL,
) -> None:
    async def test() -> None:
        async with WatchApp(lambda: list(runs), chosen).run_test(size=size) as pilot:
            await look(pilot)

    asyncio.run(test())


def test_the_last_steps_are_lines_of_text(built: RunBuilder) -> None:
    assert snapshot(built.run).steps == []
    write_steps(built.run, *range(1, 21))
    with built.run.metrics.open("a") as file:
        file.write('{"step": 21, "torn')
    shown = snapshot(built.run).steps
    assert len(shown) == 20
    assert step_line(shown[-1]) == "step 20  reward 2.000  tokens/s 2.8k  took 3.4 s"
    only_eval = {"step": 0, "eval/pass@1": 0.25, "time/step_s": 9.0}
    assert step_line(only_eval) == "step 0  pass@1 0.250  tokens/s -  took 9.0 s"


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


def test_the_command_ends_with_a_run_that_is_over(built: RunBuilder) -> None:
    built.attempt(1, "crash")
    result = call("watch", "adder")
    assert result.exit_code == 0
    assert result.output == "adder: failed, attempt 1: why 1\n"


def test_in_a_pipe_without_a_run_the_command_says_what_shows_all(built: RunBuilder) -> None:
    result = call("watch")
    assert result.exit_code == 78
    assert "`hpc-grpo status` prints all runs" in result.output


def test_phase_progress_length_prompt_and_alerts_fit_on_80_by_24(built: RunBuilder) -> None:
    built.attempt(1, ends_at=time.time() + 400)
    built.hold(1, work="generate_wait", work_at=time.time() - 100.0)
    built.state(1, step=20, waits_for="rollouts", num_groups=4, sampled=3, graded=2, trained=1, num_microbatches=6)
    write_steps(built.run, *range(1, 21), **{"tokens/truncated_fraction": 0.75, "time/generate_wait_s": 95.0})
    same = [{"ordinal": 1, "prompt": "2 * 2?", "completion": "4", "reward": 1.0}] * 2
    asked = {"ordinal": 0, "prompt": "1 + 1?", "answer": "2"}
    right = {**asked, "completion": "It is [bold]2[/].\x1b[2J\nYes.", "reward": 0.25}
    write_rollouts(built.run, {**asked, "completion": "5", "reward": 0.0}, right, *same)

    async def look(pilot: Pilot[None]) -> None:
        await until(
            pilot,
            "next run",
            "best 0.250",
            "adder  training  attempt 1, job 11",
            "now: generate 1 min 4",
            "(last step: 1 min 35 s)",
            "20/95 steps, 1 h 06 min left, this job has 6 min",
            "3 of 4 groups sampled",
            "2 of 4 groups graded",
            "1 of 6 microbatches trained",
            "1 + 1?   (answer: 2)",
            "best 0.250  It is [bold]2[/].\\x1b[2J",
            "worst 0.000  5",
            "! no job waits to train the last ",
            "half of the completions or more are cut off",
            "reward 2.000 from 0.100",
            "step 20  reward 2.000  tokens/s 2.8k  took 3.4 s",
            "next run",
        )

    on_screen(look, built.run, chosen=built.run)


def test_seconds_count_and_keys_answer_while_the_files_stall(
    built: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    built.attempt(1)
    built.hold(1, work="train", work_at=time.time() - 5.0)
    built.state(1)
    answers = threading.Event()
    monkeypatch.setattr(screen, "REFRESH_S", 0.1)
    monkeypatch.setattr(screen, "_STALLED_S", 1.0)

    async def look(pilot: Pilot[None]) -> None:
        shown = await until(pilot, "now: train")
        monkeypatch.setattr(screen, "snapshot", lambda run: answers.wait(2 * _DEADLINE_S) and snapshot(run))
        later = await until(pilot, "the files of the run do not answer")
        assert seconds_of(later) > seconds_of(shown)
        await pilot.press("r")
        await until(pilot, "walltime left")
        answers.set()

    on_screen(look, built.run, chosen=built.run)


def test_a_run_that_cannot_be_read_for_a_while_does_not_end_the_screen(
    built: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains(built)
    monkeypatch.setattr(screen, "REFRESH_S", 0.1)

    def stale(run: RunDir) -> Snapshot:
        raise OSError(errno.ESTALE, "Stale file handle")

    async def look(pilot: Pilot[None]) -> None:
        await until(pilot, "40/95 steps")
        monkeypatch.setattr(screen, "_STALLED_S", 0.5)
        monkeypatch.setattr(screen, "snapshot", stale)
        await until(pilot, "the files of the run do not answer")
        monkeypatch.setattr(screen, "snapshot", snapshot)
        built.state(1, step=50)
        await until(pilot, "50/95 steps")

    on_screen(look, built.run, chosen=built.run)


def test_the_chosen_run_stays_chosen_when_another_one_appears(
    built: RunBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [built.run]
    trains(built)
    monkeypatch.setattr(screen, "REFRESH_S", 0.1)

    async def test() -> None:
        async with WatchApp(lambda: runs).run_test(size=_SMALL) as pilot:
            await until(pilot, "adder", "open the run")
            runs.insert(0, RunBuilder(built.run.path.with_name("aardvark")).run)
            await until(pilot, "aardvark")
            await pilot.press("enter")
            await until(pilot, "adder  training")

    asyncio.run(test())


def test_keys_go_from_all_runs_to_one_to_its_neighbour_and_to_its_log(built: RunBuilder) -> None:
    other = RunBuilder(built.run.path.with_name("zebra"))
    trains(built)
    other.log(other.attempt(1, "crash"), "Out of memory.\x1b[2J\n")

    async def look(pilot: Pilot[None]) -> None:
        await until(pilot, "zebra", "training", "failed")
        await pilot.press("enter")
        await until(pilot, "adder  training")
        await pilot.press("right")
        await until(pilot, "zebra  failed")
        await pilot.press("l")
        await until(pilot, "Out of memory.")
        await pilot.press("escape", "r")
        await until(pilot, "adder")
        await pilot.press("q")

    on_screen(look, built.run, other.run, size=(100, 30))


def test_a_run_that_has_not_begun_is_shown(built: RunBuilder) -> None:
    async def look(pilot: Pilot[None]) -> None:
        await until(pilot, "adder  new", " steps")

    on_screen(look, built.run, chosen=built.run, size=(40, 12))


def test_a_run_of_episodes_shows_their_turns_and_names_what_cuts_them(built: RunBuilder) -> None:
    trains(built, step=20)
    write_steps(built.run, 20, **{"tokens/truncated_fraction": 0.75, "episode/turns": 2.0})
    turns = [{"observation": "", "text": "5", "reward": 0.0}, {"observation": "No.", "text": "7", "reward": 1.0}]
    write_rollouts(built.run, {"completion": "5 No. 7", "reward": 1.0, "turns": turns})
    shown = snapshot(built.run)
    assert shown.prompt is not None
    assert " ".join(shown.prompt.best[0].split()) == "[turn 1, reward 0] 5 [environment] No. [turn 2, reward 1] 7"
    assert "environment.max_turns, environment.max_tokens, rollout.max_new_tokens" in " ".join(shown.alerts)


@pytest.mark.parametrize(("reward", "read"), [(10**400, float("inf")), ("much", None), (1, 1.0)])
def test_a_reward_that_is_no_usual_number_is_shown(built: RunBuilder, reward: object, read: float | None) -> None:
    built.state(1, step=20)
    write_rollouts(built.run, {"completion": "Yes.", "reward": reward})
    shown = snapshot(built.run).prompt
    assert shown is not None
    assert shown.best == ("Yes.", read)


def test_a_node_that_holds_up_the_others_is_an_alert_while_the_run_trains(built: RunBuilder) -> None:
    said = "node n2 takes 1.42 times as long as the others do"
    trains(built, slow_node=said)
    assert snapshot(built.run).alerts[-1] == said
    complete(built)
    assert said not in snapshot(built.run).alerts
