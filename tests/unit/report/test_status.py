from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hpc_grpo.report.status import RunSummary, is_over, read_records, status_table, summarize
from hpc_grpo.run.chain import write_chain
from tests.support.run_builder import RunBuilder

Event = Callable[[RunBuilder], object]


def summary(built: RunBuilder, events: Sequence[Event] = ()) -> RunSummary:
    for happen in events:
        happen(built)
    return summarize(read_records(built.run), time.time())


def attempt(number: int, kind: Any = "running", **fields: Any) -> Event:
    return lambda built: built.attempt(number, kind, **fields)


def held(number: int = 1, beat_age_s: float = 2.0) -> Event:
    return lambda built: built.hold(number, beat_age_s)


def state(number: int = 1, phase: Any = "training") -> Event:
    return lambda built: built.state(number, phase)


def chain(*job_ids: str, **fields: Any) -> Event:
    return lambda built: built.chain(*job_ids, **fields)


def stop(built: RunBuilder) -> None:
    built.run.stop_marker.touch()


def marked_complete(built: RunBuilder) -> None:
    built.run.complete_marker.touch()


def submitted_again(built: RunBuilder) -> None:
    write_chain(built.run, read_records(built.run).chain.with_link("12"))


def after(kind: str, *, successor: bool = False, ended: str = "") -> list[Event]:
    jobs = ("11", "12") if successor else ("11",)
    return [attempt(1, kind), chain(*jobs, successor="12" if successor else "", ended=ended)]


def killed_in_teardown(**fields: Any) -> list[Event]:
    killed = {"signalled": "SIGTERM", "signalled_at": time.time() - 61.0, "why": "", **fields}
    return [attempt(1, **killed), chain("11", ended="Job 11 was cancelled by the user.")]


TRAINING = [attempt(1), held(), state()]
RESUMED = [attempt(1, "resumable"), attempt(2), held(2), state()]
COMPLETE = [*after("complete"), stop, marked_complete]
AT_THE_LIMIT = {"ends_at": time.time() - 60.0}
HELD_BEFORE_ITS_RECORD = [attempt(1, "crash"), held(2)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "new"),
        ([chain("11")], "submitted"),
        ([*after("crash"), submitted_again], "submitted"),
        ([attempt(1), held()], "starting"),
        (RESUMED, "starting"),
        ([*RESUMED, state(2, "starting")], "starting"),
        (HELD_BEFORE_ITS_RECORD, "starting"),
        (TRAINING, "training"),
        ([*TRAINING, stop], "stopping"),
        ([attempt(1), held(), state(1, "stopped")], "stopping"),
        (after("resumable", successor=True), "waiting"),
        (after("crash", successor=True), "waiting"),
        (after("node_lost", successor=True), "waiting"),
        ([*after("running", successor=True), held(1, 61.0)], "waiting"),
        ([attempt(1, "cancelled", ends_at=time.time() - 490.0), chain("11", "12", successor="12")], "waiting"),
        (after("cancelled", successor=True), "cancelled"),
        ([attempt(1, "cancelled"), chain("11", "12", "13", successor="12")], "cancelled"),
        (after("config", successor=True), "failed"),
        (after("resumable"), "stopped"),
        ([*after("stopped"), stop], "stopped"),
        ([*after("resumable", successor=True), stop], "stopped"),
        (COMPLETE, "complete"),
        (after("crash"), "failed"),
        (after("config"), "failed"),
        (after("bringup_failed"), "failed"),
        (after("node_lost"), "failed"),
        (after("running", ended="Gave up."), "failed"),
        (killed_in_teardown(), "cancelled"),
        ([*killed_in_teardown(), stop], "cancelled"),
        (killed_in_teardown(**AT_THE_LIMIT), "failed"),
        ([*killed_in_teardown(**AT_THE_LIMIT), stop], "stopped"),
        (killed_in_teardown(lost_nodes={"n2": "power"}), "failed"),
        (after("cancelled"), "cancelled"),
        ([*after("cancelled"), stop], "cancelled"),
        ([*after("running"), held(1, 61.0)], "lost"),
        (after("running"), "lost"),
    ],
)
def test_run_status_follows_from_the_records(built: RunBuilder, events: list[Event], expected: str) -> None:
    assert summary(built, events).state == expected


def test_a_run_that_is_still_held_is_not_over(built: RunBuilder) -> None:
    summary(built, [*TRAINING, marked_complete])
    assert not is_over(read_records(built.run), time.time())
    built.run.holder.unlink()
    assert is_over(read_records(built.run), time.time())


def test_the_numbers_of_a_training_run(built: RunBuilder) -> None:
    shown = summary(built, [attempt(1, ends_at=time.time() + 7380.5), held(1, 3.2), state()])
    assert (shown.run, shown.attempt, shown.job_id, shown.step, shown.total_steps) == ("adder", 1, "11", 40, 95)
    assert (shown.reward, shown.tokens_per_s, shown.eta_s, shown.problem) == (0.5, 2800.0, 4000.0, None)
    assert shown.walltime_left_s == pytest.approx(7380, abs=1)


def test_what_no_longer_runs_has_no_eta_and_no_walltime(built: RunBuilder) -> None:
    shown = summary(built, [attempt(1, "resumable", ends_at=time.time() + 1000.0), state(1, "stopped")])
    assert (shown.eta_s, shown.walltime_left_s, shown.heartbeat_age_s, shown.step) == (None, None, None, 40)


def test_a_reward_that_is_not_a_number_is_unknown(built: RunBuilder) -> None:
    built.state(1, reward=float("nan"))
    assert summary(built).reward is None


def test_a_damaged_file_is_named_and_hides_nothing_else(built: RunBuilder) -> None:
    summary(built, TRAINING)
    built.run.state.write_text('{"step": 1')
    built.run.chain.write_text("[]")
    shown = summary(built)
    assert (shown.state, shown.problem) == ("starting", "chain.json, state.json cannot be read.")


RESTARTED = [attempt(1, "node_lost", age_s=900.0), attempt(2), held(2)]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (after("crash"), "why 1"),
        (after("resumable"), None),
        ([*after("running"), held(1, 61.0)], "It was killed before it could say why."),
        (
            killed_in_teardown(),
            "SIGTERM asked it to end, and it was killed before it had ended. Job 11 was cancelled by the user.",
        ),
        (HELD_BEFORE_ITS_RECORD, "why 1"),
        (after("crash", ended="2 jobs have been used."), "why 1 2 jobs have been used."),
        (after("crash", ended="No new checkpoint. The last one: why 1"), "No new checkpoint. The last one: why 1"),
        (after("resumable", ended="2 jobs have been used."), "2 jobs have been used."),
        (COMPLETE, None),
        (RESTARTED, "attempt 1: why 1"),
        ([*RESTARTED, attempt(2, restarts=["It crashed."])], "Restarted in place: It crashed."),
        ([*RESTARTED, attempt(2, lost_nodes={"n2": "its agent ended"})], "Lost n2: its agent ended"),
    ],
)
def test_the_last_problem_is_a_sentence(built: RunBuilder, events: list[Event], expected: str | None) -> None:
    assert summary(built, events).problem == expected


def test_the_last_problem_is_cut_to_the_width_of_the_terminal() -> None:
    failed = RunSummary("adder", "/runs/adder", "failed", problem="x " * 200)
    assert max(map(len, status_table([failed], width=120).splitlines())) == 120
    assert len(status_table([failed]).splitlines()[1]) > 400


@pytest.mark.parametrize(
    ("jobs", "ended", "age_s", "problem"),
    [
        (("11", "12"), "", 700.0, "Job 12: It began on nid007 and ended before hpc-grpo ran in it"),
        (("11", "12"), "", 30.0, "None"),
        (("12",), "The STOP file asks the run to end.", 700.0, "The STOP file asks the run to end."),
    ],
    ids=["died in its set-up lines", "has just begun", "ran only to end its chain"],
)
def test_a_job_that_began_and_left_no_attempt_is_told_after_a_while(
    built: RunBuilder, jobs: Sequence[str], ended: str, age_s: float, problem: str
) -> None:
    built.chain(*jobs, ended=ended)
    mark = built.run.job_mark("12")
    mark.parent.mkdir(parents=True)
    mark.write_text("nid007\n")
    os.utime(mark, (time.time() - age_s,) * 2)
    assert str(summary(built).problem).startswith(problem)
