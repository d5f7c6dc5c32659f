from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

from hpc_grpo.report.records import read_records
from hpc_grpo.report.status import RunSummary, is_over, run_status, status_table, summarize
from hpc_grpo.run.chain import write_chain
from tests.support.run_builder import RunBuilder

Prepare = Callable[[RunBuilder], object]


def summary(built: RunBuilder) -> RunSummary:
    return summarize(read_records(built.run), time.time())


def held(built: RunBuilder) -> None:
    built.attempt(1)
    built.hold(1)


def training(built: RunBuilder) -> None:
    held(built)
    built.state(1)


def submitted(built: RunBuilder) -> None:
    built.chain("11")


def resubmitted_after_a_crash(built: RunBuilder) -> None:
    built.attempt(1, "crash")
    built.chain("11")
    record = read_records(built.run).chain.with_link("12")
    write_chain(built.run, record)


def resumed(built: RunBuilder) -> None:
    built.attempt(1, "resumable")
    built.attempt(2)
    built.hold(2)
    built.state(1)


def resuming(built: RunBuilder) -> None:
    resumed(built)
    built.state(2, "starting")


def held_before_its_record(built: RunBuilder) -> None:
    built.attempt(1, "crash")
    built.hold(2)


def stopping(built: RunBuilder) -> None:
    training(built)
    built.run.stop_marker.touch()


def saving_the_last_checkpoint(built: RunBuilder) -> None:
    held(built)
    built.state(1, "stopped")


def after(kind: str, successor: bool = False, stop: bool = False, ended: str = "") -> Prepare:
    def prepare(built: RunBuilder) -> None:
        built.attempt(1, kind)  # type: ignore[arg-type]
        built.chain("11", *(["12"] if successor else []), successor="12" if successor else "", ended=ended)
        if stop:
            built.run.stop_marker.touch()

    return prepare


def killed(beat_age_s: float, successor: bool = False) -> Prepare:
    def prepare(built: RunBuilder) -> None:
        after("running", successor)(built)
        built.hold(1, beat_age_s)

    return prepare


def killed_in_teardown(stop: bool = False, **fields: Any) -> Prepare:
    def prepare(built: RunBuilder) -> None:
        built.attempt(1, "running", **{"signalled": "SIGTERM", "signalled_at": time.time() - 61.0, "why": "", **fields})
        built.chain("11", ended="Job 11 was cancelled by the user.")
        if stop:
            built.run.stop_marker.touch()

    return prepare


def cancelled_by_the_limit(built: RunBuilder) -> None:
    built.attempt(1, "cancelled", ends_at=time.time() - 490.0)
    built.chain("11", "12", successor="12")


def complete(built: RunBuilder) -> None:
    after("complete", stop=True)(built)
    built.run.complete_marker.touch()


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda built: None, "new"),
        (submitted, "submitted"),
        (resubmitted_after_a_crash, "submitted"),
        (held, "starting"),
        (resumed, "starting"),
        (resuming, "starting"),
        (held_before_its_record, "starting"),
        (training, "training"),
        (stopping, "stopping"),
        (saving_the_last_checkpoint, "stopping"),
        (after("resumable", successor=True), "waiting"),
        (after("crash", successor=True), "waiting"),
        (after("node_lost", successor=True), "waiting"),
        (killed(61.0, successor=True), "waiting"),
        (cancelled_by_the_limit, "waiting"),
        (after("cancelled", successor=True), "cancelled"),
        (after("config", successor=True), "failed"),
        (after("resumable"), "stopped"),
        (after("stopped", stop=True), "stopped"),
        (after("resumable", successor=True, stop=True), "stopped"),
        (complete, "complete"),
        (after("crash"), "failed"),
        (after("config"), "failed"),
        (after("bringup_failed"), "failed"),
        (after("node_lost"), "failed"),
        (after("running", ended="Gave up."), "failed"),
        (killed_in_teardown(), "cancelled"),
        (killed_in_teardown(stop=True), "cancelled"),
        (killed_in_teardown(ends_at=time.time() - 60.0), "failed"),
        (killed_in_teardown(stop=True, ends_at=time.time() - 60.0), "stopped"),
        (killed_in_teardown(lost_nodes={"n2": "power"}), "failed"),
        (after("cancelled"), "cancelled"),
        (after("cancelled", stop=True), "cancelled"),
        (killed(61.0), "lost"),
        (after("running"), "lost"),
    ],
)
def test_run_status_follows_from_the_records(built: RunBuilder, prepare: Prepare, expected: str) -> None:
    prepare(built)
    assert run_status(read_records(built.run), time.time()) == expected


def test_a_run_that_is_still_held_is_not_over(built: RunBuilder) -> None:
    training(built)
    built.run.complete_marker.touch()
    assert not is_over(read_records(built.run), time.time())
    built.run.holder.unlink()
    assert is_over(read_records(built.run), time.time())


def test_the_numbers_of_a_training_run(built: RunBuilder) -> None:
    built.attempt(1, ends_at=time.time() + 7380.5)
    built.hold(1, beat_age_s=3.2)
    built.state(1)
    shown = summary(built)
    assert (shown.run, shown.attempt, shown.job_id, shown.step, shown.total_steps) == ("adder", 1, "11", 40, 95)
    assert (shown.reward, shown.tokens_per_s, shown.eta_s) == (0.5, 2800.0, 4000.0)
    assert shown.walltime_left_s == pytest.approx(7380, abs=1)
    assert shown.problem is None


def test_what_no_longer_runs_has_no_eta_and_no_walltime(built: RunBuilder) -> None:
    built.attempt(1, "resumable", ends_at=time.time() + 1000.0)
    built.state(1, "stopped")
    shown = summary(built)
    assert (shown.eta_s, shown.walltime_left_s, shown.heartbeat_age_s) == (None, None, None)
    assert shown.step == 40


def test_a_reward_that_is_not_a_number_is_unknown(built: RunBuilder) -> None:
    built.state(1, reward=float("nan"))
    assert summary(built).reward is None


def test_a_damaged_file_is_named_and_hides_nothing_else(built: RunBuilder) -> None:
    training(built)
    built.run.state.write_text('{"step": 1')
    built.run.chain.write_text("[]")
    shown = summary(built)
    assert shown.state == "starting"
    assert shown.problem == "chain.json, state.json cannot be read."


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (after("crash"), "why 1"),
        (after("resumable"), None),
        (killed(61.0), "It was killed before it could say why."),
        (
            killed_in_teardown(),
            "SIGTERM asked it to end, and it was killed before it had. Job 11 was cancelled by the user.",
        ),
        (held_before_its_record, "why 1"),
        (after("crash", ended="2 jobs have been used."), "why 1 2 jobs have been used."),
        (after("crash", ended="No new checkpoint. The last one: why 1"), "No new checkpoint. The last one: why 1"),
        (after("resumable", ended="2 jobs have been used."), "2 jobs have been used."),
        (complete, None),
    ],
)
def test_the_last_problem_is_a_sentence(built: RunBuilder, prepare: Prepare, expected: str | None) -> None:
    prepare(built)
    assert summary(built).problem == expected


def test_the_problem_of_an_earlier_attempt_names_it(built: RunBuilder) -> None:
    built.attempt(1, "node_lost", age_s=900.0)
    built.attempt(2)
    built.hold(2)
    assert summary(built).problem == "attempt 1: why 1"
    built.attempt(2, restarts=["It crashed."])
    assert summary(built).problem == "Restarted in place: It crashed."
    built.attempt(2, lost_nodes={"n2": "its agent ended"})
    assert summary(built).problem == "Lost n2: its agent ended"


def test_the_last_problem_is_cut_to_the_width_of_the_terminal() -> None:
    failed = RunSummary("adder", "/runs/adder", "failed", problem="x " * 200)
    assert max(map(len, status_table([failed], width=120).splitlines())) == 120
    assert len(status_table([failed]).splitlines()[1]) > 400


def test_a_job_that_ran_only_to_end_its_chain_did_not_die(built: RunBuilder) -> None:
    built.chain("11", ended="The STOP file asks the run to end.")
    mark = built.run.job_mark("11")
    mark.parent.mkdir(parents=True)
    mark.write_text("nid007\n")
    os.utime(mark, (time.time() - 700.0,) * 2)
    assert summary(built).problem == "The STOP file asks the run to end."


@pytest.mark.parametrize(("age_s", "is_told"), [(700.0, True), (30.0, False)])
def test_a_job_that_died_in_its_set_up_lines_is_told(built: RunBuilder, age_s: float, is_told: bool) -> None:
    built.chain("11", "12")
    mark = built.run.job_mark("12")
    mark.parent.mkdir(parents=True)
    mark.write_text("nid007\n")
    os.utime(mark, (time.time() - age_s,) * 2)
    problem = summary(built).problem or ""
    assert problem.startswith("Job 12: It began on nid007 and ended before hpc-grpo ran in it") == is_told
